"""Command-line arguments that all scripts validate alike, before any measurement."""

import argparse
from collections.abc import Callable
from typing import Any


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a `type=` for argparse: an int or a float (`kind`) above zero."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0; found {text}")
        return value

    parse.__name__ = kind.__name__  # argparse shows it if the text is not a number
    return parse
