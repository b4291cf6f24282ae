"""Formats numbers for people: counts, durations, bytes."""

import math


def short_number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits: `12.3k`, `1.05M`, `0.0032`, `3e-07`."""
    if not math.isfinite(value):
        return str(value)
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * (1 - 0.5 * 10**-digits):
            return _significant(value / factor, digits) + suffix
    return _significant(value, digits)


def si_number(value: float) -> str:
    """Format a number with an SI prefix, ready for a unit to be appended: `11.3 m`, `2.5 `, `1.2 k`, `40 µ`."""
    if not math.isfinite(value) or value == 0 or abs(value) < 1e-9 or abs(value) >= 1e18:
        return f"{value:.3g} "
    power = min(5, max(-3, math.floor(math.log10(abs(value)) / 3 + 1e-9)))
    prefix = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P"}[power]
    return f"{_significant(value / 1000.0**power, 3)} {prefix}"


def _significant(value: float, digits: int) -> str:
    if value and abs(value) < 1e-4:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    decimals = max(0, digits - 1 - (math.floor(math.log10(abs(value))) if value else 0))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(seconds: float) -> str:
    """Format a duration: `45s`, `3m20s`, `2h05m`, `3d04h`."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def byte_size(count: float) -> str:
    """Format a number of bytes: `512 B`, `1.5 MiB`, `80.2 GiB`."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def plural(count: int, noun: str) -> str:
    """Return `count` and the noun, with an "s" unless the count is 1: `1 file`, `2 files`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
