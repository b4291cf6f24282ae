"""Renders a chart as HTML: an SVG that stretches with the page, with labels of constant size around it."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxstack.observe.number_format import short_number
from jaxstack.observe.report.axes import Axis, step_axis, value_axis
from jaxstack.observe.report.series import Series, downsample

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
