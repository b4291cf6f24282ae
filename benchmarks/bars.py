"""Horizontal bars as a stand-alone SVG, in the colours of a run's report."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.picture import document

WIDTH = 760
LABEL = 190
VALUE = 170
ROW = 26
GAP = 16
TOP = 58
FILLS = {
    "first": "var(--first)",
    "second": "var(--second)",
    "soft": "var(--soft)",
    "third": "#2c9950",
    "fourth": "#9a6ae0",
}


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its parts as (length, colour name of `FILLS`), and the text at its end."""

    label: str
    parts: Sequence[tuple[float, str]]
    value: str


@dataclass(frozen=True)
class Group:
    """Bars under a common heading; the heading may be empty."""

    title: str
    bars: Sequence[Bar]


def draw_bars(
    groups: Sequence[Group], title: str, note: str, mark: float | None = None, keys: Sequence[tuple[str, str]] = ()
) -> str:
    """Return the SVG.

    Args:
        groups: Groups of bars from top to bottom, all on one scale that begins at zero.
        title: Heading of the chart, also its accessible name.
        note: One line under the heading.
        mark: Position of a dashed vertical line, such as a limit.
        keys: Legend, as pairs of colour name and text.
    """
    longest = max([sum(length for length, _ in bar.parts) for group in groups for bar in group.bars] + [mark or 0])
    scale = (WIDTH - LABEL - VALUE - 30) / longest
    body = [
        f'<text x="18" y="27" font-size="16" font-weight="600">{html.escape(title)}</text>',
        f'<text x="18" y="46" class="soft" font-size="12">{html.escape(note)}</text>',
    ]
    y = TOP
    for group in groups:
        if group.title:
            body.append(f'<text x="18" y="{y + 15}" font-weight="600">{html.escape(group.title)}</text>')
            y += ROW - 4
        for bar in group.bars:
            body.append(_bar(bar, y, scale))
            y += ROW
        y += GAP
    if mark is not None:
        x = LABEL + mark * scale
        body.append(
            f'<path d="M{x:.1f} {TOP}V{y - GAP}" stroke="var(--ink)" stroke-dasharray="5 4" stroke-width="1.2"/>'
        )
    if keys:
        spans = "".join(
            f'<tspan dx="14" fill="{FILLS[fill]}">&#9632;</tspan><tspan dx="5">{text}</tspan>' for fill, text in keys
        )
        body.append(f'<text x="4" y="{y + 6}" font-size="12.5">{spans}</text>')
        y += ROW
    return document(WIDTH, y, "\n".join(body), title)


def _bar(bar: Bar, y: float, scale: float) -> str:
    x = float(LABEL)
    drawn = []
    for length, fill in bar.parts:
        drawn.append(
            f'<rect x="{x:.1f}" y="{y}" width="{length * scale:.1f}" height="{ROW - 8}" rx="3" fill="{FILLS[fill]}"/>'
        )
        x += length * scale
    label = f'<text x="{LABEL - 10}" y="{y + 14}" text-anchor="end" class="soft">{html.escape(bar.label)}</text>'
    return f'{label}{"".join(drawn)}<text x="{x + 8:.1f}" y="{y + 14}">{html.escape(bar.value)}</text>'
