"""Arguments that every script checks alike: what is wrong ends the script with one message, before a measurement."""

import argparse
from collections.abc import Callable
from typing import Any


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A `type=` of argparse: an int or a float (`kind`) above zero."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be above 0; found {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number
    return parse
