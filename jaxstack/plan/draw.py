"""A plan as text for a terminal: mesh, tables, and which device holds which part of an array."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxstack.functional.shardings import describe_unsplit
from jaxstack.observe.device_grid import (
    axes_of_copies,
    describe_dims,
    distinct_layouts,
    number_ranges,
    panels_name,
    split_panels,
)
from jaxstack.observe.units import byte_size

_MOST = 16
"""Rows and columns of a picture; what is more is left out, and said."""


def draw_plan(plan: Mapping[str, Any], show_sharding: bool = False) -> str:
    """The text of `describe_plan`'s result, with the tables and pictures of shardings where asked for."""
    sharding = plan["sharding"]
    mesh, held = sharding["mesh"], sharding["device_bytes"]
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "no axis above 1"
    count = plan["devices"]
    lines = [
        f"{plan['name']}: {plan['parameters_total']:,} parameters on {count} device{'s' * (count > 1)}",
        *(["(the vocabulary is that of the tokenizer that the run would train)"] if plan["vocabulary_assumed"] else []),
        "",
        f"mesh: {shape}",
        *draw_mesh(mesh),
        "",
        "a device holds between steps",
        *_table([(name, byte_size(size)) for name, size in [*held.items(), ("together", sum(held.values()))]]),
        *(
            draw_rehearsal(plan["rehearsal"])
            if "rehearsal" in plan
            else ["(gradients, activations and gathered weights come on top: --rehearse asks the compiler)"]
        ),
        *describe_unsplit(sharding),
        "",
        f"a step: {plan['tokens_a_step']:,} tokens, {plan['model_flops_a_step'] / 1e12:,.4g} model TFLOP, "
        f"{plan['model_flops_a_step_and_device'] / 1e12:,.4g} a device",
    ]
    if pipeline := plan.get("pipeline"):
        lines += ["", *draw_pipeline(pipeline)]
    if show_sharding:
        lines += ["", *_parameters(sharding["parameters"])]
        lines += ["", *draw_layouts(sharding["parameters"], mesh)] if mesh else []
    return "\n".join(line.rstrip() for line in lines)


def draw_mesh(mesh: Mapping[str, int]) -> list[str]:
    """Every device by its number, the last axis across and the others down."""
    if not mesh:
        return []
    *outer, (last, across) = mesh.items()
    heads = [axis for axis, _ in outer]
    shown = min(across, _MOST)
    more = ["..."] if across > shown else []
    rows: list[list[str]] = [[*heads, f"{last} 0", *map(str, range(1, shown)), *more]]
    total = 1
    for _, size in outer:
        total *= size
    for row in range(min(total, _MOST)):
        place, rest = [], row
        for _, size in reversed(outer):
            place.insert(0, str(rest % size))
            rest //= size
        rows.append([*place, *(str(row * across + column) for column in range(shown)), *more])
    cut = [f"  ... and {total - _MOST} more rows"] if total > _MOST else []
    return _table(rows, right=True) + cut


def draw_rehearsal(found: Mapping[str, Any]) -> list[str]:
    """What the compiled step needs, and whether it fits."""
    rows = [
        ("state and batch", byte_size(found["arguments_bytes"])),
        ("working memory", byte_size(found["temporary_bytes"])),
        ("together", byte_size(found["predicted_bytes"])),
        ("usable", byte_size(found["usable_bytes"])),
        *([("in host memory", byte_size(found["host_bytes"]))] if found["host_bytes"] else []),
    ]
    verdict = "it fits" if found["fits"] else "it does NOT fit: docs/gpus-and-clusters.md tells what to change"
    return [
        "",
        f"a device needs in a step, compiled for {found['kind'].upper()} by jax {found['jax']}",
        *_table(rows),
        f"{verdict} (compiled in {found['compile_seconds']:.0f} s; {', '.join(found['kernels'])})",
    ]


def _table(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    pad = str.rjust if right else str.ljust
    return ["  " + "  ".join(pad(cell, width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _parameters(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ("parameter", "shape", "dims / mesh axes that split them", "a device's part", "bytes")
    cells = [
        (
            row["parameter"] + (f" and {row['arrays'] - 1} like it" if row["arrays"] > 1 else ""),
            _shape(row["shape"]),
            describe_dims(row),
            _shape(row["device_shape"]),
            byte_size(row["device_bytes"] * row["arrays"]),
        )
        for row in rows
    ]
    return _table([head, *cells])


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one"


def draw_layouts(rows: Sequence[Mapping[str, Any]], mesh: Mapping[str, int]) -> list[str]:
    """Of every way in which arrays are split one as boxes, with the devices that hold each."""
    lines = []
    for row, others in distinct_layouts(rows):
        like = f", and {others} split alike" if others else ""
        copies = axes_of_copies(row, mesh)
        kept = f"; copies along {', '.join(copies)}" if copies else ""
        lines += [f"{row['parameter']} ({describe_dims(row)}{kept}){like}"]
        panels = split_panels(row, mesh)
        for number, panel in enumerate(panels[:_MOST]):
            lines += [f"  {panels_name(row)}, part {number}"] if len(panels) > 1 else []
            lines += _boxes([[number_ranges(cell) for cell in line[:_MOST]] for line in panel[:_MOST]])
        if max(panels.shape) > _MOST:
            lines += [f"  ... ({' x '.join(map(str, panels.shape))} parts in all)"]
        lines += [""]
    return lines[:-1]


def _boxes(cells: Sequence[Sequence[str]]) -> list[str]:
    width = max(len(cell) for row in cells for cell in row)
    rule = "  +" + "+".join(["-" * (width + 2)] * len(cells[0])) + "+"
    lines = [rule]
    for row in cells:
        lines += ["  |" + "|".join(f" {cell.center(width)} " for cell in row) + "|", rule]
    return lines


def draw_pipeline(pipeline: Mapping[str, Any]) -> list[str]:
    """The schedule, a line a stage, time from left to right: F, B and W with the number of the microbatch."""
    found = (
        f"pipeline: {pipeline['schedule']}, {pipeline['stages']} stages, {pipeline['microbatches']} microbatches; "
        f"{100 * pipeline['bubble_of_work']:.1f} % of the work's time is bubble, activations of up to "
        f"{max(pipeline['peak_microbatches_held'])} microbatches are held"
    )
    spans = [span for span in pipeline["spans"] if span[1] < 2 * _MOST]
    columns = 2 + max(len(str(span[4])) for span in spans)
    unit = columns * pipeline["virtual_stages"]
    length = round(unit * max(span[2] for span in spans))
    lines = []
    for stage in range(pipeline["stages"]):
        line = ""
        for _, start, end, kind, microbatch, chunk in sorted(span for span in spans if span[0] == stage):
            line = line.ljust(round(start * unit), ".")
            name = f"{kind.lower() if chunk % 2 else kind}{microbatch}"
            line += name.ljust(round(end * unit) - round(start * unit), "-" if kind == "B" else " ")
        lines.append(f"  stage {stage}  {line.ljust(length, '.')}")
    legend = "  F forward, B backward, W weight gradients, each with its microbatch; small letters: odd virtual stages"
    cut = len(spans) < len(pipeline["spans"])
    return [found, *lines, legend + ("; the first part of the step" if cut else "")]
