"""Draws the operators of a model on the roofline of a device as SVG."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxstack.observe.number_format import duration, short_number, si_number
from jaxstack.observe.report.markup import render_value

# in units of the SVG's own coordinates
WIDTH = 1000
HEIGHT = 460
_LEFT = 70
_RIGHT = 30
_TOP = 40
_BOTTOM = 46
_KINDS = ("matmul", "attention", "elementwise", "gather")
_STYLE = """.roofline text { font: 12px system-ui, sans-serif; fill: #5c6470; }
.roofline .roof { fill: none; stroke: #171a1f; stroke-width: 2; } .roofline .grid { stroke: #e3e6ea; fill: none; }
.roofline .ridge { stroke: #9aa3af; stroke-dasharray: 5 5; fill: none; }
.roofline circle { stroke: #fff; fill-opacity: .85; } .roofline .matmul { fill: #2463d6; }
.roofline .attention { fill: #d1500b; } .roofline .elementwise { fill: #2f8f4e; } .roofline .gather { fill: #8a6fc0; }
.roofline .name { fill: #171a1f; }"""


def render_roofline(record: Mapping[str, Any]) -> str:
    """Render a model's operators on the roofline of a device as HTML: the picture and a table.

    `record` is the result of `jaxstack.cost_model.roofline.describe_roofline`.

    Args:
      record: the device's peaks, and the operators with their FLOPs and bytes.
    """
    rows = [
        {
            "operator": f"{number}. {row['operator']}",
            "calls": row["calls"],
            "TFLOP": float(row["flops"]) / 1e12,
            "traffic_bytes": row["traffic_bytes"],
            "FLOP per byte": float(row["intensity"]),
            "limited by": row["limit"],
            "share of the time": f"{100 * row['share']:.1f} %",
        }
        for number, row in enumerate(record["operators"], 1)
    ]
    note = (
        f"At best {_seconds(record['seconds'])} per step on each device ({record['device']}), without communication. "
        f"Operators left of {record['ridge']:.0f} FLOP per byte are limited by memory."
    )
    return f'<figure class="roofline-figure">{draw_roofline(record)}</figure><p>{html.escape(note)}</p>' + render_value(
        rows
    )


def draw_roofline(record: Mapping[str, Any]) -> str:
    """Draw operators on a device's roofline as one SVG that stands alone: FLOP/s over arithmetic intensity.

    Each operator is a circle at its intensity, whose area is its share of the time, with its number in the table.
    """
    operators: Sequence[Mapping[str, Any]] = record["operators"]
    peak = float(record["peak_flops"])
    bandwidth = float(record["bandwidth"])
    ridge = float(record["ridge"])
    known = [float(row["intensity"]) for row in operators if row["intensity"] > 0]
    low = math.floor(math.log10(min([*known, ridge]) / 2))
    high = math.ceil(math.log10(max([*known, ridge]) * 1.3))
    bottom = math.floor(math.log10(min(peak, bandwidth * 10**low)))
    top = math.log10(peak * 2)

    def x(intensity: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (math.log10(intensity) - low) / (high - low)

    def y(rate: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (math.log10(rate) - bottom) / (top - bottom)

    start = max(10.0**low, 10.0**bottom / bandwidth)
    roof = f"M{x(start):.1f} {y(start * bandwidth):.1f}L{x(ridge):.1f} {y(peak):.1f}H{WIDTH - _RIGHT}"
    places = {
        number: (x(float(row["intensity"])), y(min(peak, float(row["intensity"]) * bandwidth)))
        for number, row in enumerate(operators, 1)
        if row["intensity"] > 0
    }
    largest_first = sorted(places, key=lambda number: -float(operators[number - 1]["share"]))
    circles = [_circle(operators[number - 1], *places[number]) for number in largest_first]
    label = f"{record['device']}: {peak / 1e12:.0f} TFLOP/s, {bandwidth / 1e9:.0f} GB/s"
    return (
        f'<svg class="roofline" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Roofline of {html.escape(str(record["device"]), quote=True)}"><style>{_STYLE}</style>'
        f"{_axes(low, high, bottom, math.floor(top), x, y)}"
        f'<path class="ridge" d="M{x(ridge):.1f} {y(peak):.1f}V{HEIGHT - _BOTTOM}"/><path class="roof" d="{roof}"/>'
        f"{''.join(circles)}{_numbers(operators, places)}{_legend(operators)}"
        f'<text x="{WIDTH - _RIGHT}" y="14" text-anchor="end">{html.escape(label)}</text></svg>'
    )


def _axes(low: int, high: int, bottom: int, top: int, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """Return the grid lines and labels of both axes, at powers of ten."""
    parts = []
    for power in range(low, high + 1):
        left = x(10.0**power)
        label = short_number(10.0**power)
        parts.append(f'<path class="grid" d="M{left:.1f} {_TOP}V{HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{left:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{label}</text>')
    for power in range(bottom, top + 1):
        height = y(10.0**power)
        parts.append(f'<path class="grid" d="M{_LEFT} {height:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{si_number(10.0**power)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{HEIGHT - 8}">FLOP per byte</text>')
    parts.append('<text x="4" y="14">FLOP/s</text>')
    return "".join(parts)


def _radius(row: Mapping[str, Any]) -> float:
    return 5 + 25 * math.sqrt(float(row["share"]))


def _circle(row: Mapping[str, Any], left: float, top: float) -> str:
    kind = row["kind"] if row["kind"] in _KINDS else "elementwise"
    intensity = short_number(float(row["intensity"]))
    tip = html.escape(f"{row['operator']}: {intensity} FLOP per byte, {100 * row['share']:.1f} % of the time")
    circle = f'<circle class="{kind}" cx="{left:.1f}" cy="{top:.1f}" r="{_radius(row):.1f}"/>'
    return f"<g><title>{tip}</title>{circle}</g>"


def _numbers(operators: Sequence[Mapping[str, Any]], places: Mapping[int, tuple[float, float]]) -> str:
    """Return SVG labels with each operator's number, below its circle, moved down where labels would overlap."""
    parts = []
    taken: list[tuple[float, float]] = []
    for number, (left, top) in sorted(places.items(), key=lambda item: item[1][0]):
        height = top + _radius(operators[number - 1]) + 13
        while any(abs(left - x) < 20 and abs(height - y) < 13 for x, y in taken):
            height += 1
        taken.append((left, height))
        parts.append(f'<text class="name" x="{left:.1f}" y="{height:.1f}" text-anchor="middle">{number}</text>')
    return "".join(parts)


def _legend(operators: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture's legend, the operators' names by number, in the empty corner under the roof."""
    parts = []
    for number, row in enumerate(operators, 1):
        top = HEIGHT - _BOTTOM - 14 * (len(operators) - number) - 12
        kind = row["kind"] if row["kind"] in _KINDS else "elementwise"
        left = WIDTH - _RIGHT - 190
        parts.append(f'<circle class="{kind}" cx="{left - 10}" cy="{top - 4}" r="4"/>')
        parts.append(f'<text class="name" x="{left}" y="{top}">{number}. {html.escape(str(row["operator"]))}</text>')
    return "".join(parts)


def _seconds(seconds: float) -> str:
    return duration(seconds) if seconds >= 60 else f"{si_number(seconds)}s"
