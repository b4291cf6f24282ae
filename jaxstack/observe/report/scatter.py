"""Renders a scatter plot over any quantity as an HTML figure, in the style of the charts over steps."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxstack.observe.report.axes import Axis, linear_ticks, log_ticks, value_axis
from jaxstack.observe.report.chart import SIZE


@dataclass(frozen=True)
class Point:
    """A point of a scatter plot, with its tooltip `tip`; the style `look` is "first", "second" or "faint"."""

    x: float
    y: float
    tip: str
    look: str = "first"


@dataclass(frozen=True)
class Scatter:
    """A scatter plot: its points, and their common horizontal axis.

    Attributes:
      title: title of the figure.
      points: the points.
      low: left end of the horizontal axis.
      high: right end.
      log: True for a logarithmic horizontal axis.
      labels: texts at 0, 1, 2, ... instead of numbers, for points over a list of choices.
      joined: draw a line through the points.
      wide: take the whole width of the page.
    """

    title: str
    points: Sequence[Point]
    low: float
    high: float
    log: bool = False
    labels: Sequence[str] = ()
    joined: bool = False
    wide: bool = False


def render_scatter(scatter: Scatter) -> str:
    """Render a scatter plot as an HTML figure; an empty string without points."""
    points = [point for point in scatter.points if np.isfinite(point.y)]
    if not points:
        return ""
    y = value_axis(np.array([point.y for point in points]))
    ticks = log_ticks(scatter.low, scatter.high) if scatter.log else linear_ticks(scatter.low, scatter.high, 4)
    x = Axis(scatter.low, scatter.high, scatter.log, ticks)
    lefts = x.position(np.array([point.x for point in points], np.float64))
    tops = 1 - y.position(np.array([point.y for point in points]))
    dots = "".join(
        f'<i class="{point.look}" title="{html.escape(point.tip, quote=True)}" '
        f'style="left:{100 * left:.2f}%;top:{100 * top:.2f}%"></i>'
        for point, left, top in zip(points, lefts, tops, strict=True)
        if not scatter.joined or point.look == "second"
    )
    line = " ".join(f"{SIZE * left:.1f},{SIZE * top:.1f}" for left, top in zip(lefts, tops, strict=True))
    drawn = f'<polyline class="line first" points="{line}" fill="none"/>' if scatter.joined else ""
    named = enumerate(scatter.labels) if scatter.labels else ()
    columns = [(float(x.position(np.array(float(i)))), text) for i, text in named] or x.labelled_ticks()
    rows = y.labelled_ticks()
    grid = "".join(f"M0 {SIZE * (1 - position):.1f}H{SIZE}" for position, _ in rows)
    return f"""<figure class="chart still{" wide" if scatter.wide else ""}">
<figcaption><b>{html.escape(scatter.title)}</b></figcaption>
<div class="frame"><div class="y">{_texts(rows, "bottom")}</div>
<div class="plot"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" \
aria-label="{html.escape(scatter.title, quote=True)}"><path class="grid" d="{grid}"/>{drawn}</svg>{dots}</div>
<div class="x">{_texts(columns, "left")}</div></div></figure>"""


def _texts(labels: Sequence[tuple[float, str]], side: str) -> str:
    return "".join(f'<span style="{side}:{100 * at:.2f}%">{html.escape(text)}</span>' for at, text in labels)
