"""Sections of the report: energy and cost, forecast against measurement, pipeline timeline, sharding pictures."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxstack.observe.number_format import byte_size, short_number, si_number
from jaxstack.observe.report.chart import Chart, Curve
from jaxstack.observe.report.markup import render_value, row_table
from jaxstack.observe.report.series import Series, make_series
from jaxstack.parallel.mesh import (
    describe_dims,
    device_grid,
    distinct_layouts,
    format_number_ranges,
    panels_name,
    replicating_axes,
    split_panels,
)

KEYS = ("power_watts", "joules_per_token", "total_joules_per_token", "energy_kwh", "gpu_hours", "cost")
"""Keys of a metrics line, see `jaxstack.observe.energy.EnergyMeter.read`."""


def energy_tiles(metrics: Mapping[str, Series], ended: object) -> list[tuple[str, str, str]]:
    """Return (label, value, note) tiles of the total energy, GPU-hours and cost of a run.

    Args:
      metrics: the series of the run; their last values are used while the run trains.
      ended: the same values at the end of the run, from `environment.json`, if it has ended.
    """
    last = {key: metrics[key].last for key in KEYS if key in metrics}
    if isinstance(ended, Mapping):
        last |= {key: ended[key] for key in KEYS if isinstance(ended.get(key), int | float)}
    found: list[tuple[str, str, str]] = []
    if (kwh := last.get("energy_kwh")) is not None:
        joules = last.get("total_joules_per_token")
        note = f"{si_number(joules)}J per token, with all overhead" if joules is not None else ""
        found.append(("Energy", f"{short_number(kwh)} kWh", note))
    if (hours := last.get("gpu_hours")) is not None:
        found.append(("GPU-hours", short_number(hours), "over all starts"))
    if (cost := last.get("cost")) is not None:
        found.append(("Cost", f"{cost:,.2f}", "GPU-hours × observe.price_per_gpu_hour"))
    return found


def energy_charts(metrics: Mapping[str, Series]) -> list[Chart]:
    """Return the charts of a run's power and of its energy per token."""
    empty = make_series([])
    in_steps = Curve("in steps", metrics.get("joules_per_token", empty).scaled(1000))
    overall = Curve("with overhead", metrics.get("total_joules_per_token", empty).scaled(1000), "second")
    power = Curve("all GPUs", metrics.get("power_watts", empty))
    return [
        Chart("Energy per token", [in_steps, overall], "mJ", from_zero=True),
        Chart("Power", [power], "W", from_zero=True),
    ]


WARN_ABOVE = 0.15
"""Relative difference above which a warning is shown."""


def render_forecast(forecast: object, metrics: Mapping[str, Series]) -> str:
    """Render predicted and measured step time, throughput and memory as HTML; empty without a forecast.

    Args:
      forecast: `forecast` of `environment.json`: `step_seconds`, `tokens_per_second` and `predicted_bytes`, and
        `seconds` and `memory_bytes` by part.
      metrics: the run's metrics by key.
    """
    if not isinstance(forecast, Mapping):
        return ""
    rows = []
    warnings = []
    for title, predicted, measured, show in _quantities(forecast, metrics):
        row = {"quantity": title, "predicted": show(predicted), "measured": "–", "difference": "–"}
        if measured:
            difference = measured / predicted - 1
            row |= {"measured": show(measured), "difference": f"{100 * difference:+.1f} %"}
            if abs(difference) > WARN_ABOVE:
                warnings.append(f"{title} differs from the forecast by {100 * difference:+.0f} %")
        rows.append(row)
    seconds = forecast.get("seconds")
    for name, value in seconds.items() if isinstance(seconds, Mapping) else ():
        rows.append({"quantity": f"of the step: {name.replace('_', ' ')}", "predicted": f"{short_number(value)} s"})
    if not rows:
        return ""
    warning = f'<p class="ended"><b>{html.escape("; ".join(warnings))}.</b></p>' if warnings else ""
    title = f"Forecast for {html.escape(str(forecast.get('cluster', 'this cluster')))}"
    return f'<h2>{title}</h2>{warning}<div class="card">{row_table(rows)}</div>'


def _quantities(
    forecast: Mapping[str, Any], metrics: Mapping[str, Series]
) -> list[tuple[str, float, float | None, Any]]:
    """Return (title, predicted, measured, formatter) of each predicted quantity, such as step time and memory."""
    peak = metrics.get("peak_memory_bytes")
    found = [
        ("time of a step", "step_seconds", _median(metrics, "step_time_seconds"), lambda x: f"{short_number(x)} s"),
        ("tokens per second", "tokens_per_second", _median(metrics, "tokens_per_second"), short_number),
        ("memory of a device", "predicted_bytes", None if peak is None else peak.last, byte_size),
    ]
    return [
        (title, float(forecast[key]), measured, show)
        for title, key, measured, show in found
        if isinstance(forecast.get(key), int | float) and forecast[key] > 0
    ]


def _median(metrics: Mapping[str, Series], key: str) -> float | None:
    series = metrics.get(key)
    return float(np.median(series.finite)) if series is not None and series.finite.size else None


WIDTH = 1000  # in units of the SVG's own coordinates
ROW = 22
GAP = 3
LEFT = 58
_MAX_BOXES = 4000  # so that the page stays small
_LOOKS = {"F": ("forward", "f"), "B": ("backward", "b"), "W": ("weight gradients", "w")}


def render_timeline(pipeline: Mapping[str, Any]) -> str:
    """Render a run's pipeline schedule as HTML: a table of its properties, and a picture if the tasks' times are known.

    `pipeline` is the result of `describe_schedule`.

    `spans` are rows (stage, start, end, kind, microbatch, chunk); the unit of time is a stage's forward pass.
    """
    known = {key: value for key, value in pipeline.items() if key != "spans"}
    table = render_value(known)
    spans = [span for span in pipeline.get("spans") or () if isinstance(span, Sequence) and len(span) == 6]
    return f"{render_picture(spans)}{table}" if spans else table


def render_picture(spans: Sequence[Sequence[Any]]) -> str:
    """Draw the tasks of a pipeline schedule over time, as an HTML figure with an SVG."""
    shown = sorted(spans, key=lambda span: span[1])[:_MAX_BOXES]
    end = max(float(span[2]) for span in shown)
    stages = 1 + max(int(span[0]) for span in shown)
    scale = (WIDTH - LEFT) / end
    height = stages * (ROW + GAP)
    rows = "".join(
        f'<text class="stage" x="0" y="{_top(stage) + 15}">stage {stage}</text>'
        f'<rect class="idle" x="{LEFT}" y="{_top(stage)}" width="{WIDTH - LEFT}" height="{ROW}"/>'
        for stage in range(stages)
    )
    boxes = "".join(_box(span, scale) for span in shown)
    kinds = [kind for kind in _LOOKS if any(span[3] == kind for span in shown)]
    keys = "".join(f'<span class="task-{_LOOKS[kind][1]}">{_LOOKS[kind][0]}</span>' for kind in kinds)
    cut = " (the first part of it)" if len(shown) < len(spans) else ""
    return (
        f'<figure class="pipeline"><figcaption><b>One step, simulated{cut} <small>numbers are microbatches; empty is '
        f'bubble</small></b><span class="legend">{keys}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Schedule of the pipeline">{rows}{boxes}</svg>'
        "</figure>"
    )


def _top(stage: int) -> int:
    return stage * (ROW + GAP)


def _box(span: Sequence[Any], scale: float) -> str:
    stage, start, end, kind, microbatch, chunk = span
    left = LEFT + float(start) * scale
    width = (float(end) - float(start)) * scale
    name, look = _LOOKS.get(str(kind), ("task", "f"))
    tip = html.escape(f"{name}, microbatch {microbatch}, chunk {chunk}: {start} to {end}")
    shade = " second" if int(chunk) % 2 else ""
    top = _top(int(stage))
    label = ""
    if width > 9 * len(str(microbatch)):
        label = f'<text x="{left + width / 2:.1f}" y="{top + 15}">{int(microbatch)}</text>'
    return (
        f'<g class="task-{look}{shade}"><title>{tip}</title>'
        f'<rect x="{left:.2f}" y="{top}" width="{max(width - 0.6, 0.4):.2f}" height="{ROW}"/>{label}</g>'
    )


# in units of the SVG's own coordinates
BOX = 64
TILE_ROW = 30
TILE_GAP = 6
HEAD = 22
_MOST = 16  # largest number of boxes in a row, rows in a panel, and panels
_HUES = 8  # number of colours, used in turn


def render_sharding(sharding: Mapping[str, Any]) -> str:
    """Render how a run is sharded as HTML: its mesh, pictures of arrays, and a table of the parameters.

    `sharding` is the result of `describe_shardings`.
    """
    rows = [row for row in sharding.get("parameters") or () if isinstance(row, Mapping)]
    mesh = sharding.get("mesh") or {}
    table = [
        {
            "parameter": row["parameter"],
            "arrays": row["arrays"],
            "shape": _shape(row["shape"]),
            "dims / mesh axes": describe_dims(row),
            "on a device": _shape(row["device_shape"]),
            "each_bytes": row["device_bytes"],
        }
        for row in rows
    ]
    held = {f"{name}_bytes": size for name, size in (sharding.get("device_bytes") or {}).items()}
    pictures = [picture_of_mesh(mesh), *picture_layouts(rows, mesh)] if mesh else []
    figures = "".join(_figure(title, note, svg) for title, note, svg in pictures)
    return (
        (f'<div class="shardings">{figures}</div>' if figures else "")
        + f"<p>A device holds between steps:</p>{render_value(held)}"
        + f"<details><summary>Every parameter</summary>{render_value(table)}</details>"
    )


def picture_of_mesh(mesh: Mapping[str, int]) -> tuple[str, str, str]:
    """Draw a mesh's devices, as (title, note, SVG): last axis as columns, the one before as rows, others as panels."""
    grid = device_grid(mesh, [[axis] for axis in mesh])
    panels = grid.reshape(-1, *([1, *grid.shape])[-2:])
    axes = list(mesh)
    note = f"{axes[-1]} across" + (f", {axes[-2]} down" if len(axes) > 1 else "")
    note += f", {' x '.join(axes[:-2])} as panels" if len(axes) > 2 else ""
    title = "Mesh: " + " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    return title, note, draw_panels(panels, " x ".join(axes[:-2]), by_part=False)


def picture_layouts(rows: Sequence[Mapping[str, Any]], mesh: Mapping[str, int]) -> list[tuple[str, str, str]]:
    """Draw one array for each distinct sharding, as (title, note, SVG) with the devices that hold each part."""
    pictures = []
    for row, others in distinct_layouts(rows):
        copies = replicating_axes(row, mesh)
        note = describe_dims(row) + (f"; copies along {', '.join(copies)}" if copies else "")
        note += f"; {others} more split alike" if others else ""
        pictures.append((row["parameter"], note, draw_panels(split_panels(row, mesh), panels_name(row))))
    return pictures


def draw_panels(panels: np.ndarray, name: str, by_part: bool = True) -> str:
    """Draw boxes of device numbers, arranged as [panels, rows, columns], as SVG; one colour per box, or per panel."""
    shown = panels[:_MOST, :_MOST, :_MOST]
    count, down, across = shown.shape
    longest = max(len(format_number_ranges(cell)) for cell in shown.flat)
    box = max(BOX if by_part else BOX // 2, 8 * longest + 14)
    title = HEAD if len(panels) > 1 else 0
    side = min(count, max(1, round(900 / (across * box + 3 * TILE_GAP))))
    width = across * box + 3 * TILE_GAP
    height = down * TILE_ROW + title + 2 * TILE_GAP
    parts = []
    for number, panel in enumerate(shown):
        left = number % side * width
        top = number // side * height
        if title:
            parts.append(f'<text class="name" x="{left}" y="{top + 14}">{html.escape(name)}, {number}</text>')
        for (row, column), devices in np.ndenumerate(panel):
            hue = (number * down * across + row * across + column if by_part else number) % _HUES
            x = left + column * box
            y = top + title + row * TILE_ROW
            parts.append(
                f'<g class="hue{hue}"><rect x="{x}" y="{y}" width="{box - 3}" height="{TILE_ROW - 3}" rx="3"/>'
                f'<text x="{x + (box - 3) / 2:.0f}" y="{y + 18}">{format_number_ranges(devices)}</text></g>'
            )
    size = f"{side * width} {-(-count // side) * height}"
    cut = "" if panels.shape == shown.shape else f"<p>the first of {' x '.join(map(str, panels.shape))} parts</p>"
    return (
        f'<svg viewBox="0 0 {size}" style="max-width:{side * width}px" role="img" aria-label="devices">'
        f"{''.join(parts)}</svg>{cut}"
    )


def _figure(title: str, note: str, svg: str) -> str:
    caption = f"<figcaption><b>{html.escape(title)}</b><small>{html.escape(note)}</small></figcaption>"
    return f'<figure class="sharding">{caption}{svg}</figure>'


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"
