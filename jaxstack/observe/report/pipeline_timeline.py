"""Draws a pipeline schedule: a row per stage, time from left to right, a box per task."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from jaxstack.observe.report.tables import render_value

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
