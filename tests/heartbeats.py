"""What commands in processes print, without the lines that show on a slow machine that they are at work."""

import re


def without_heartbeats(said: str) -> str:
    """The text without lines such as `compiling the step: 6 s`."""
    return re.sub(r"(?m)^[^\n:]+: \d+ s\n", "", said)
