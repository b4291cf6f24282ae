"""Curves as a stand-alone SVG with panels side by side, in the colours of a run's report."""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxstack.observe.report.chart import Axis, step_axis, value_axis
from jaxstack.observe.report.markup import CSS

WIDTH = 400
HEIGHT = 260
LEFT = 50
TOP = 40
GAP = 30
COLOURS = ("var(--first)", "var(--second)", "#2c9950", "#9a6ae0", "var(--soft)", "#d0559c")


@dataclass(frozen=True)
class Panel:
    """A plot; `curves` maps the name of a curve to its points (x, y)."""

    title: str
    x_label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]


def document(width: float, height: float, body: str, title: str) -> str:
    """Return a stand-alone SVG with the report's colours, for light and dark pages."""
    colours = re.findall(r"(?:^|(?<=\} )):root \{.*?\}|^@media \(prefers-color-scheme.*?\} \}", CSS, re.M | re.S)
    rules = "text { fill: var(--ink); font-variant-numeric: tabular-nums; } .soft { fill: var(--soft); }"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="system-ui, sans-serif" font-size="13" role="img" '
        f'aria-label="{html.escape(title, quote=True)}">\n<style>{" ".join(colours)} {rules}</style>\n'
        f'<rect width="{width:g}" height="{height:g}" rx="10" fill="var(--card)" stroke="var(--rule)"/>\n'
        f"{body}\n</svg>\n"
    )


def draw(panels: Sequence[Panel], title: str) -> str:
    """Return the SVG of the panels; a curve has the same colour in each panel."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    step = LEFT + WIDTH + GAP
    parts = [
        f'<g transform="translate({index * step + LEFT},{TOP})">{_panel(panel, colours)}</g>'
        for index, panel in enumerate(panels)
    ]
    width = len(panels) * step + GAP
    height = TOP + HEIGHT + 70
    lines = _legend_lines(names, width - LEFT)
    for line, shown in enumerate(lines):
        keys = "".join(
            f'<tspan dx="14" fill="{colours[name]}">&#9632;</tspan><tspan dx="4">{html.escape(name)}</tspan>'
            for name in shown
        )
        parts.append(f'<text x="{LEFT - 14}" y="{height - 14 + 18 * line}">{keys}</text>')
    return document(width, height + 18 * (len(lines) - 1), "\n".join(parts), title)


def _legend_lines(names: Sequence[str], width: float) -> list[list[str]]:
    """Return the names in lines of at most this width, at about 7.5 pixels per letter."""
    lines: list[list[str]] = [[]]
    for name in names:
        if lines[-1] and sum(7.5 * len(other) + 32 for other in [*lines[-1], name]) > width:
            lines.append([])
        lines[-1].append(name)
    return lines


def _panel(panel: Panel, colours: Mapping[str, str]) -> str:
    points = np.array([point for curve in panel.curves.values() for point in curve], float)
    x = step_axis(points[:, 0].min(), points[:, 0].max())
    y = value_axis(points[:, 1], scale="linear")
    lines = "".join(
        f'<polyline fill="none" stroke="{colours[name]}" stroke-width="1.5" points="{_path(curve, x, y)}"/>'
        for name, curve in panel.curves.items()
    )
    across = "".join(
        f'<path stroke="var(--grid)" d="M0 {HEIGHT * (1 - at):.1f}H{WIDTH}"/>'
        f'<text x="-6" y="{HEIGHT * (1 - at) + 4:.1f}" text-anchor="end">{label}</text>'
        for at, label in y.labelled_ticks()
    )
    below = "".join(
        f'<text x="{WIDTH * at:.1f}" y="{HEIGHT + 18}" text-anchor="middle">{label}</text>'
        for at, label in x.labelled_ticks()
    )
    return (
        f'<text y="-14" font-weight="bold">{html.escape(panel.title)}</text>{across}{below}{lines}'
        f'<text x="{WIDTH}" y="{HEIGHT + 34}" text-anchor="end">{html.escape(panel.x_label)}</text>'
    )


def _path(curve: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    points = np.array(curve, float)
    lefts = WIDTH * x.position(points[:, 0])
    tops = HEIGHT * (1 - y.position(points[:, 1]))
    return " ".join(f"{left:.1f},{top:.1f}" for left, top in zip(lefts, tops, strict=True))
