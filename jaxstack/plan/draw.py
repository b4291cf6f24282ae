"""Describes how a run is laid out on a mesh, without its devices, and draws that as text for a terminal."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import jax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from jaxstack.cost_model.layouts import count_tokens
from jaxstack.cost_model.roofline import describe_roofline, find_peak
from jaxstack.errors import ConfigError, cannot_write
from jaxstack.files import write_file
from jaxstack.models import count_parameters, model_flops_per_token
from jaxstack.models.layer import CacheRoom
from jaxstack.module_arrays.shardings import describe_unsplit
from jaxstack.observe.number_format import byte_size
from jaxstack.observe.report.roofline import draw_roofline
from jaxstack.parallel import AXES
from jaxstack.parallel.mesh import (
    describe_dims,
    distinct_layouts,
    format_number_ranges,
    panels_name,
    replicating_axes,
    split_panels,
)
from jaxstack.plan.rehearsal import Rehearsal, resolve_plan
from jaxstack.run.build import make_trainer
from jaxstack.run.build_model import build_model
from jaxstack.run_config import RunConfig


class LayoutPlan(TypedDict):
    """Description of a run's parameters, FLOPs, shardings and pipeline on a cluster, as plain JSON.

    Attributes:
      name: name of the run.
      devices: number of devices.
      parameters_total: number of parameters.
      vocabulary_assumed: True if the vocabulary is that of a tokenizer that the run would train first.
      tokens_per_step: tokens of a global batch.
      model_flops_per_step: model FLOPs of a step, over all devices.
      model_flops_per_step_and_device: model FLOPs of a step on each device.
      cache_bytes_per_token: bytes that the server keeps for each token of a text on a GPU, such as keys and values.
      cache_bytes_per_text: bytes that it keeps for each text whatever its length, such as states.
      sharding: mesh, parameters and bytes per device; see `jaxstack.module_arrays.shardings.describe_shardings`.
      pipeline: schedule of the pipeline, if there is one.
      rehearsal: memory of the compiled step, if it was compiled.
      roofline: operators of the step, if they were drawn; see `jaxstack.cost_model.roofline.describe_roofline`.
    """

    name: str
    devices: int
    parameters_total: int
    vocabulary_assumed: bool
    tokens_per_step: int
    model_flops_per_step: float
    model_flops_per_step_and_device: float
    cache_bytes_per_token: NotRequired[int]
    cache_bytes_per_text: NotRequired[int]
    sharding: dict[str, Any]
    pipeline: NotRequired[dict[str, Any]]
    rehearsal: NotRequired[Rehearsal]
    roofline: NotRequired[dict[str, Any]]


def describe_plan(config: RunConfig, devices: int | None = None) -> LayoutPlan:
    """Describe how a run is laid out on `devices` devices: parameters, FLOPs, shardings and pipeline.

    Args:
      config: configuration of the run.
      devices: number of devices; default: `parallel.simulate_devices`, or the product of the degrees.

    Raises:
      ConfigError: the degrees, the model or the batch do not fit, or the number of devices is not known.
    """
    config, assumed = resolve_plan(config, devices)
    degrees = config.parallel.degrees
    mesh = AbstractMesh(tuple(degrees.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    trainer = make_trainer(config, lambda step: {}, mesh=mesh)
    count = count_parameters(config.model)
    train = config.train
    tokens = count_tokens(config)
    flops = model_flops_per_token(config.model, train.sequence_length) * tokens
    plan: LayoutPlan = {
        "name": config.run.name,
        "devices": math.prod(degrees.values()),
        "parameters_total": count.total,
        "vocabulary_assumed": assumed,
        "tokens_per_step": tokens,
        "model_flops_per_step": flops,
        "model_flops_per_step_and_device": flops / math.prod(degrees.values()),
        "sharding": trainer.describe_sharding(),
    }
    plan["cache_bytes_per_token"], plan["cache_bytes_per_text"] = _count_cache_bytes(config)
    if trainer.pipeline is not None:
        plan["pipeline"] = trainer.describe_pipeline()
    return plan


def _count_cache_bytes(config: RunConfig) -> tuple[int, int]:
    """Return the bytes that the server keeps for each token of a text, and for each text besides."""
    make = build_model(config, config.precision.compute_dtype("gpu"))

    def count(slots: int, pages: int) -> int:
        room = CacheRoom(slots, config.train.sequence_length, pages, 1)
        made = jax.eval_shape(lambda: make(nnx.Rngs(0)).make_shared_cache(room))
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(made))

    one = count(1, 1)
    return count(1, 2) - one, count(2, 1) - one


_MAX_CELLS = 16
"""Maximum number of rows and of columns of a drawing; a note says what is left out."""


def draw_plan(plan: LayoutPlan, show_sharding: bool = False) -> str:
    """Draw a layout plan as text: mesh, stored memory, FLOPs per step, and optionally all shardings.

    Args:
      plan: result of `describe_plan`.
      show_sharding: also list all parameters, and draw which device holds which shard.
    """
    sharding = plan["sharding"]
    mesh = sharding["mesh"]
    stored = sharding["device_bytes"]
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "no axis above 1"
    count = plan["devices"]
    lines = [
        f"{plan['name']}: {plan['parameters_total']:,} parameters on {count} device{'s' * (count > 1)}",
        *(
            ["(assuming the vocabulary of the tokenizer that the run would train)"]
            if plan["vocabulary_assumed"]
            else []
        ),
        "",
        f"mesh: {shape}",
        *draw_mesh(mesh),
        "",
        "stored on each device between steps",
        *_table([(name, byte_size(size)) for name, size in [*stored.items(), ("total", sum(stored.values()))]]),
        *(
            draw_rehearsal(plan["rehearsal"])
            if "rehearsal" in plan
            else ["(without gradients, activations and gathered weights: --rehearse asks the compiler)"]
        ),
        *describe_unsplit(sharding),
        "",
        f"per step: {plan['tokens_per_step']:,} tokens, {plan['model_flops_per_step'] / 1e12:,.4g} model TFLOP, "
        f"{plan['model_flops_per_step_and_device'] / 1e12:,.4g} on each device",
    ]
    parts = (("token", "cache_bytes_per_token"), ("text, whatever its length", "cache_bytes_per_text"))
    kept = [f"{byte_size(plan[key])} per {of}" for of, key in parts if plan.get(key)]
    lines += [f"a server keeps {' and '.join(kept)}"] if kept else []
    if pipeline := plan.get("pipeline"):
        lines += ["", *draw_pipeline(pipeline)]
    if roofline := plan.get("roofline"):
        lines += ["", *draw_operators(roofline)]
    if show_sharding:
        lines += ["", *_parameter_table(sharding["parameters"])]
        lines += ["", *draw_layouts(sharding["parameters"], mesh)] if mesh else []
    return "\n".join(line.rstrip() for line in lines)


def draw_mesh(mesh: Mapping[str, int]) -> list[str]:
    """Draw the mesh as a table of device numbers: columns are its last axis, rows all other axes."""
    if not mesh:
        return []
    *outer, (last, across) = mesh.items()
    heads = [axis for axis, _ in outer]
    shown = min(across, _MAX_CELLS)
    more = ["..."] if across > shown else []
    rows: list[list[str]] = [[*heads, f"{last} 0", *map(str, range(1, shown)), *more]]
    total = 1
    for _, size in outer:
        total *= size
    for row in range(min(total, _MAX_CELLS)):
        place = []
        remaining = row
        for _, size in reversed(outer):
            place.insert(0, str(remaining % size))
            remaining //= size
        rows.append([*place, *(str(row * across + column) for column in range(shown)), *more])
    cut = [f"  ... and {total - _MAX_CELLS} more rows"] if total > _MAX_CELLS else []
    return _table(rows, right=True) + cut


def draw_rehearsal(found: Rehearsal) -> list[str]:
    """Draw a table of the memory of the compiled train step, and a line that says if it fits the device."""
    rows = [
        ("state and batch", byte_size(found["arguments_bytes"])),
        ("temporaries", byte_size(found["temporary_bytes"])),
        ("total", byte_size(found["predicted_bytes"])),
        ("usable", byte_size(found["usable_bytes"])),
        *([("in host memory", byte_size(found["host_bytes"]))] if found["host_bytes"] else []),
    ]
    verdict = "it fits" if found["fits"] else "it does NOT fit: see docs/gpus-and-clusters.md for what to change"
    return [
        "",
        f"needed on each device in a step, compiled for {found['kind'].upper()} by jax {found['jax']}",
        *_table(rows),
        f"{verdict} (compiled in {found['compile_seconds']:.0f} s; {', '.join(found['kernels'])})",
    ]


def draw_operators(roofline: Mapping[str, Any]) -> list[str]:
    """Draw a table of a training step's operators: FLOPs, traffic, arithmetic intensity, and what limits them."""
    head = ("", "calls", "GFLOP", "traffic", "FLOP/byte", "limit", "share")
    cells = [
        (
            row["operator"],
            str(row["calls"]),
            f"{row['flops'] / 1e9:,.4g}",
            byte_size(row["traffic_bytes"]),
            f"{row['intensity']:.3g}",
            row["limit"],
            f"{100 * row['share']:.1f} %",
        )
        for row in roofline["operators"]
    ]
    return [
        f"operators of a step on each {roofline['device'].upper()}, at best {1000 * roofline['seconds']:,.4g} ms "
        f"without communication (limited by memory below {roofline['ridge']:.0f} FLOP/byte)",
        *_table([head, *cells]),
    ]


def _table(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    pad = str.rjust if right else str.ljust
    return ["  " + "  ".join(pad(cell, width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _parameter_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ("parameter", "shape", "dims / mesh axes that split them", "shard", "bytes")
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
    """Draw one parameter for each distinct sharding: its shards as boxes that list the devices holding them."""
    lines = []
    for row, others in distinct_layouts(rows):
        alike = f", and {others} split alike" if others else ""
        axes = replicating_axes(row, mesh)
        replicated = f"; replicated along {', '.join(axes)}" if axes else ""
        lines += [f"{row['parameter']} ({describe_dims(row)}{replicated}){alike}"]
        panels = split_panels(row, mesh)
        for number, panel in enumerate(panels[:_MAX_CELLS]):
            lines += [f"  {panels_name(row)}, part {number}"] if len(panels) > 1 else []
            lines += _boxes([[format_number_ranges(cell) for cell in line[:_MAX_CELLS]] for line in panel[:_MAX_CELLS]])
        if max(panels.shape) > _MAX_CELLS:
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
    """Draw a pipeline schedule as a line per stage: F3 forward of microbatch 3, B3 backward, W3 weight gradients."""
    found = (
        f"pipeline: {pipeline['schedule']}, {pipeline['stages']} stages, {pipeline['microbatches']} microbatches; "
        f"{100 * pipeline['bubble_of_work']:.1f} % bubble relative to the work, activations of up to "
        f"{max(pipeline['peak_microbatches_held'])} microbatches stored"
    )
    spans = [span for span in pipeline["spans"] if span[1] < 2 * _MAX_CELLS]
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
    legend = "  F forward, B backward, W weight gradients, each with its microbatch; lower case: odd virtual stages"
    cut = len(spans) < len(pipeline["spans"])
    return [found, *lines, legend + ("; the first part of the step" if cut else "")]


def write_roofline(config: RunConfig, devices: int | None, device: str, path: str | Path) -> dict[str, Any]:
    """Draw the operators of a train step on a device's roofline into an SVG file; return them as plain JSON.

    Args:
      config: configuration of the run.
      devices: number of devices; default: see `describe_plan`.
      device: kind of device, such as "h200".
      path: the SVG file to write.

    Raises:
      ConfigError: the layout is not possible, the device is not known, or the file cannot be written.
    """
    if Path(path).suffix.lower() != ".svg":
        raise ConfigError(f"--roofline {path} must be an SVG file: give a name that ends in .svg.")
    peak = find_peak(device)
    if peak is None:
        raise ConfigError(
            f"--device: the peak rates of {device} are not known; known are h200, h100, a100, l40s, gb200."
        )
    record = describe_roofline(resolve_plan(config, devices)[0], peak)
    try:
        write_file(Path(path), draw_roofline(record).encode(), durable=False)
    except OSError as error:
        raise cannot_write(f"the picture {path}", error) from None
    return record
