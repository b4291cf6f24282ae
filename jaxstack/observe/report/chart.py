"""Renders line and scatter charts as HTML: an SVG that stretches with the page, and labels of constant size."""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxstack.observe.number_format import short_number
from jaxstack.observe.report.series import Series, downsample


@dataclass(frozen=True)
class Axis:
    """An axis of a chart from `low` to `high`, linear or logarithmic."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    def position(self, values: np.ndarray) -> np.ndarray:
        """Return the positions of values along the axis, 0 at `low` and 1 at `high`."""
        if self.log:
            low = math.log10(self.low)
            high = math.log10(self.high)
            return (np.log10(values) - low) / (high - low)
        return (values - self.low) / (self.high - self.low)

    def labelled_ticks(self) -> list[tuple[float, str]]:
        """Return (position, label) of every tick, with as few digits as distinguish the ticks."""
        ticks = np.array(self.ticks)
        gap = float(np.min(np.diff(ticks))) if ticks.size > 1 else abs(float(ticks[0])) or 1.0
        digits = next((d for d in range(1, 8) if np.all(_rounding_errors(ticks, d) <= 0.02 * gap)), 8)
        labels = (short_number(tick, digits) for tick in self.ticks)
        return [(float(p), label) for p, label in zip(self.position(ticks), labels, strict=True)]


def _rounding_errors(values: np.ndarray, digits: int) -> np.ndarray:
    """Return the errors of rounding each value to `digits` significant digits."""
    return np.array([abs(float(f"{value:.{digits - 1}e}") - value) for value in values])


def value_axis(values: np.ndarray, scale: str = "auto", from_zero: bool = False) -> Axis:
    """Return the vertical axis of a chart of these values.

    Args:
      values: known values, finite.
      scale: "linear", "log", or "auto": logarithmic if all values are positive, their ratio exceeds 30, and
        `from_zero` is not set.
      from_zero: let a linear axis begin at zero.
    """
    low = float(np.min(values))
    high = float(np.max(values))
    log = low > 0 and (scale == "log" or (scale == "auto" and not from_zero and high / low > 30))
    if log:
        low, high = (low / 1.1, high * 1.1) if high / low < 1.01 else (low, high * (high / low) ** 0.03)
        return Axis(low, high, True, log_ticks(low, high))
    if from_zero:
        low = min(low, 0.0)
        high = max(high, 0.0)
    span = high - low or abs(high) or 1.0
    bottom = low if from_zero and low == 0 else low - 0.05 * span
    top = high if from_zero and high == 0 and low < 0 else high + 0.05 * span
    return Axis(bottom, top, False, linear_ticks(bottom, top))


def step_axis(low: float, high: float) -> Axis:
    """Return the horizontal axis of a chart over steps, without margins; a single step is in the middle."""
    if high <= low:
        return Axis(low - 1, low + 1, False, (low,))
    ticks = linear_ticks(low, high, 6)
    whole = tuple(tick for tick in ticks if tick == round(tick))
    return Axis(low, high, False, whole or ticks)


def linear_ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Return about `count` round ticks between `low` and `high`, spaced by 1, 2, 2.5 or 5 times a power of ten."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(float(f"{index * step:.12g}") for index in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return about three to six round numbers between `low` and `high` as ticks of a logarithmic axis.

    These are powers of ten; if fewer than three, 1 and 3 times powers of ten; then 1, 2 and 5 times; if still fewer,
    the ticks of a linear axis.
    """
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = [f * 10.0**e for e in range(first, last + 1) for f in factors if low <= f * 10.0**e <= high]
        if len(ticks) >= 3:
            return tuple(ticks[:: math.ceil(len(ticks) / 6)])
    return linear_ticks(low, high)


SIZE = 1000  # units of the SVG's own coordinates; the browser stretches them to the plot


@dataclass(frozen=True)
class Curve:
    """A labelled series in a chart, with its style: "first", "second", "faint" or "dashed"."""

    label: str
    series: Series
    look: str = "first"


@dataclass(frozen=True)
class Chart:
    """A titled chart of one or more curves over training steps, or over the quantity that the field `over` names."""

    title: str
    curves: Sequence[Curve]
    unit: str = ""
    scale: str = "auto"
    from_zero: bool = False
    wide: bool = False
    over: str = "step"
    many: bool = False
    """Too many curves for a legend and a read-out; a curve tells its label when one points at it."""


def render_chart(chart: Chart) -> str:
    """Render a chart as an HTML figure; an empty string if no curve has a known value."""
    drawable = [curve for curve in chart.curves if curve.series.finite.size]
    curves = [Curve(curve.label, downsample(curve.series), curve.look) for curve in drawable]
    if not curves:
        return ""
    y = value_axis(np.concatenate([curve.series.finite for curve in curves]), chart.scale, chart.from_zero)
    steps = np.concatenate([curve.series.steps for curve in curves])
    x = step_axis(float(steps.min()), float(steps.max()))
    notes = ", ".join(filter(None, [chart.unit, "log scale" if y.log else ""]))
    title = html.escape(chart.title) + (f" <small>{html.escape(notes)}</small>" if notes else "")
    named = curves if len(curves) > 1 and not chart.many else []
    legend = "".join(f'<span class="key {curve.look}">{html.escape(curve.label)}</span>' for curve in named)
    lines = "".join(_path(curve, x, y, chart.many) for curve in curves)
    if chart.many:
        output = data = ""
    else:
        output = f"<output>{html.escape(_last_values(curves, chart))}</output>"
        data = f'<script type="application/json">{_hover_data(curves, chart, x, y)}</script>\n'
    return f"""<figure class="chart{" wide" if chart.wide else ""}{" still" if chart.many else ""}">
<figcaption><b>{title}</b><span class="legend">{legend}</span></figcaption>
{output}
<div class="frame"><div class="y">{_labels(y, "bottom")}</div>
<div class="plot"><svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" \
aria-label="{html.escape(chart.title, quote=True)} over {chart.over}s">{_grid(y)}{lines}</svg></div>
<div class="x">{_labels(x, "left")}</div></div>
{data}</figure>"""


def _last_values(curves: Sequence[Curve], chart: Chart) -> str:
    """Return the text of a chart's read-out while the mouse pointer is elsewhere: the last value of each curve."""
    last = max(float(curve.series.steps[np.isfinite(curve.series.values)][-1]) for curve in curves)
    values = [f"{curve.label} {short_number(curve.series.last or 0.0, 5)}" for curve in curves]
    return " · ".join([f"{chart.over} {last:.0f}", *values]) + (f" {chart.unit}" if chart.unit else "")


def _labels(axis: Axis, side: str) -> str:
    return "".join(
        f'<span style="{side}:{100 * position:.2f}%">{html.escape(label)}</span>'
        for position, label in axis.labelled_ticks()
    )


def _grid(axis: Axis) -> str:
    heights = [SIZE * (1 - position) for position, _ in axis.labelled_ticks()]
    return f'<path class="grid" d="{"".join(f"M0 {height:.1f}H{SIZE}" for height in heights)}"/>'


def _path(curve: Curve, x: Axis, y: Axis, named: bool = False) -> str:
    """Return the SVG path of a curve, broken at gaps; the round line cap turns a point between two gaps into a dot."""
    known = np.isfinite(curve.series.values) & ((curve.series.values > 0) | (not y.log))
    lefts = SIZE * x.position(curve.series.steps)
    tops = SIZE * (1 - y.position(np.where(known, curve.series.values, 1.0)))
    parts: list[str] = []
    for index in np.flatnonzero(known):
        joined = index > 0 and known[index - 1]
        parts.append(f"{'L' if joined else 'M'}{lefts[index]:.1f} {tops[index]:.1f}")
        ends = index + 1 == known.size or not known[index + 1]
        if not joined and ends:
            parts.append("h0.01")
    lone = " lone" if np.count_nonzero(known) <= 1 else ""
    end = f"><title>{html.escape(curve.label)}</title></path>" if named else "/>"
    return f'<path class="line {curve.look}{lone}" d="{"".join(parts)}"{end}'


def _hover_data(curves: Sequence[Curve], chart: Chart, x: Axis, y: Axis) -> str:
    """Return the values that a chart shows under the mouse pointer, as JSON that is safe in a script element."""
    data = {
        "unit": chart.unit,
        "over": chart.over,
        "x": [x.low, x.high],
        "y": [y.low, y.high, int(y.log)],
        "curves": [
            {
                "label": curve.label,
                "look": curve.look,
                "steps": [int(s) if s == int(s) else float(s) for s in curve.series.steps],
                "values": [float(f"{v:.6g}") if np.isfinite(v) else None for v in curve.series.values],
            }
            for curve in curves
        ],
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


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
