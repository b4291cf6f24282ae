"""Draws a mesh and sharded arrays: a box per device, or per part of an array with the devices that hold it."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxstack.observe.device_grid import (
    describe_dims,
    device_grid,
    distinct_layouts,
    format_number_ranges,
    panels_name,
    replicating_axes,
    split_panels,
)
from jaxstack.observe.report.tables import render_value

# in units of the SVG's own coordinates
BOX = 64
ROW = 30
GAP = 6
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
    side = min(count, max(1, round(900 / (across * box + 3 * GAP))))
    width = across * box + 3 * GAP
    height = down * ROW + title + 2 * GAP
    parts = []
    for number, panel in enumerate(shown):
        left = number % side * width
        top = number // side * height
        if title:
            parts.append(f'<text class="name" x="{left}" y="{top + 14}">{html.escape(name)}, {number}</text>')
        for (row, column), devices in np.ndenumerate(panel):
            hue = (number * down * across + row * across + column if by_part else number) % _HUES
            x = left + column * box
            y = top + title + row * ROW
            parts.append(
                f'<g class="hue{hue}"><rect x="{x}" y="{y}" width="{box - 3}" height="{ROW - 3}" rx="3"/>'
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
