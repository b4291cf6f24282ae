"""Assembles `report.html`, the page about a run, from the files of its run directory."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jaxstack.files import write_file
from jaxstack.observe.environment import read_environment
from jaxstack.observe.noise_scale import KEYS as NOISE_KEYS
from jaxstack.observe.number_format import byte_size, duration, short_number
from jaxstack.observe.report.chart import Chart, Curve, render_chart
from jaxstack.observe.report.markup import CSS, SCRIPT, render_value
from jaxstack.observe.report.panels import KEYS as ENERGY_KEYS
from jaxstack.observe.report.panels import (
    energy_charts,
    energy_tiles,
    render_forecast,
    render_sharding,
    render_timeline,
)
from jaxstack.observe.report.roofline import render_roofline
from jaxstack.observe.report.samples import render_samples
from jaxstack.observe.report.series import Series, make_series, read_metrics, smooth

Tile = tuple[str, str, str] | None
"""Label, value and note of a tile."""
_MAX_TEXT = 200_000  # characters of configuration shown, so that the page stays small
_MAX_OTHER_CHARTS = 12
# Shown in their own chart or tile; every other number that a run logs gets a plain chart.
_NOT_PLAIN = {
    "loss",
    "mean_loss",
    "eval_loss",
    "eval_bits_per_byte",
    "eval_seconds",
    "eval_items",
    "grad_norm",
    "learning_rate",
    "router_entropy",
    "router_dropped",
    "expert_load",
    "expert_overload",
    "expert_overload_layer",
    "tokens",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "step_time_seconds",
    "model_tflops_per_device",
    "mfu",
    "peak_memory_bytes",
    "data_wait_fraction",
    "train_seconds",
    "all_train_seconds",
    "rollout_seconds",
    "reward_seconds",
    "reward",
    "eval_reward",
    "eval_reward_greedy",
    "goodput",
    *ENERGY_KEYS,
    *NOISE_KEYS,
}
_SHOWN_ELSEWHERE = ("ran", "schedule", "forecast", "roofline")  # sections of environment.json
_SECTION_TITLES = {
    "attention": "Attention backends",
    "matmuls": "Matmuls of the compiled step",
    "collectives": "Collectives of the compiled step (bytes per device and step)",
    "memory": "Memory",
    "mesh": "Mesh",
    "pipeline": "Schedule of the pipeline",
    "sharding": "Where the parameters lie (numbers are devices, in the order of the mesh)",
    "kernels": "Kernels chosen, and why others were passed over",
}
_DRAWN = {"pipeline": render_timeline, "sharding": render_sharding}


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into a run directory, and return its path.

    The inputs are `metrics.jsonl`, `config.yaml`, `samples.json` and `environment.json`, each of which may be missing
    or incomplete. Of the last it shows `ran` (what actually ran) and draws `schedule`, pairs of step and learning rate.
    The page is one file without external resources, and stays small for runs of any length.
    """
    run_dir = Path(run_dir)
    metrics = read_metrics(run_dir / "metrics.jsonl")
    environment = read_environment(run_dir)
    config_text = _read_text(run_dir / "config.yaml")
    config = _parse_config(config_text)
    name = str(_section(config, "run").get("name") or run_dir.resolve().name)
    page = "\n".join(
        [
            page_head(name),
            f"<h1>{html.escape(name)}</h1>",
            f'<p class="lead">{html.escape(_lead(environment, metrics))}</p>',
            _ending(environment),
            _tiles(metrics, config, environment),
            render_forecast(environment.get("forecast"), metrics),
            _charts(metrics, environment),
            render_samples(run_dir),
            render_forecast(environment.get("forecast"), metrics),
            _sections("What actually ran", environment.get("ran")),
            _roofline(environment.get("roofline")),
            _details(config_text, environment),
            _FOOTER,
            f"</main><script>{SCRIPT}</script></body></html>",
        ]
    )
    path = run_dir / "report.html"
    write_file(path, page.encode(), durable=False)
    return path


_FOOTER = (
    "<footer>Model FLOPs: 6 × matmul parameters (without the input embedding, with the output head) + causal "
    "attention at half of 12 × layers × sequence × hidden per token; recomputation is not counted. MFU: "
    "against the device's dense bfloat16 peak, for FP8 runs too. Written by jaxstack.</footer>"
)


def page_head(name: str) -> str:
    """Return the beginning of an HTML page, up to its `<main>`, with the style sheet of all reports."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(name)} - jaxstack</title><style>{CSS}</style></head><body><main>"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parse_config(text: str) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, Mapping) else {}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _lead(environment: Mapping[str, Any], metrics: Mapping[str, Series]) -> str:
    """Return the line under the report's title: devices, version of jax, start."""
    parts = []
    kinds = environment.get("device_kinds")
    if isinstance(kinds, list) and kinds:
        parts.append(f"{environment.get('devices', '?')} × {', '.join(map(str, kinds))}")
    versions = environment.get("versions")
    if isinstance(versions, Mapping) and "jax" in versions:
        parts.append(f"jax {versions['jax']}")
    if started := environment.get("started"):
        parts.append("started " + str(started).replace("T", " ").replace("+00:00", " UTC"))
    if not metrics:
        parts.append("no metrics logged yet")
    return " · ".join(parts)


def _ending(environment: Mapping[str, Any]) -> str:
    """Return a line that says why a run stopped or failed; empty for a run that finished."""
    ended = environment.get("ended")
    if not isinstance(ended, Mapping) or ended.get("state") not in ("stopped", "failed"):
        return ""
    checkpoint = ended.get("checkpoint")
    kept = f"the newest checkpoint is of step {checkpoint}" if checkpoint is not None else "there is no checkpoint"
    text = f"The run {'was ' * (ended['state'] == 'stopped')}{ended['state']} after step {ended.get('step')}; {kept}."
    reason = html.escape(str(ended.get("reason", "")))
    return f'<p class="ended"><b>{html.escape(text)}</b> {reason}</p>'


def _tiles(metrics: Mapping[str, Series], config: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Render the tiles at the top of the report, with the run's final figures."""
    return render_tiles(_all_tiles(metrics, config, environment))


def render_tiles(tiles: Sequence[Tile]) -> str:
    """Render tiles (label, value, note) as HTML; a tile of None is left out."""
    shown = [tile for tile in tiles if tile]
    cells = (
        f'<div class="tile"><span>{html.escape(label)}</span><b>{html.escape(value)}</b>'
        f"<small>{html.escape(note)}</small></div>"
        for label, value, note in shown
    )
    return f'<div class="tiles">{"".join(cells)}</div>' if shown else ""


def _all_tiles(metrics: Mapping[str, Series], config: Mapping[str, Any], environment: Mapping[str, Any]) -> list[Tile]:
    tiles = [*_result_tiles(metrics, config, environment), *_speed_tiles(metrics)]
    return [*tiles, *energy_tiles(metrics, environment.get("energy"))]


def _result_tiles(
    metrics: Mapping[str, Series], config: Mapping[str, Any], environment: Mapping[str, Any]
) -> list[Tile]:
    tiles: list[Tile] = []
    if metrics:
        done = max(float(series.steps[-1]) for series in metrics.values())
        ended = environment.get("ended")
        if isinstance(ended, Mapping) and isinstance(ended.get("step"), int):
            done = max(done, float(ended["step"]))  # steps between two logged ones count too
        total = _section(config, "train").get("steps")
        tiles.append(("Steps", f"{done:.0f}", f"of {total}" if isinstance(total, int) else ""))
    if (loss := _last(metrics, "mean_loss")) is not None:
        tiles.append(("Training loss", f"{loss:.4f}", "mean since the line before"))
    elif (loss := _last(metrics, "loss")) is not None:
        tiles.append(("Training loss", f"{loss:.4f}", "last logged"))
    for label, name in (("Held-out reward", "reward"), ("Greedy reward", "reward_greedy")):
        if (value := _last(metrics, f"eval_{name}")) is not None:
            first = float(metrics[f"eval_{name}"].finite[0])
            tiles.append((label, f"{value:.3f}", f"held-out, first {first:.3f}"))
    for label, name in (("Held-out loss", "loss"), ("Bits per byte", "bits_per_byte")):
        if (value := _last(metrics, f"eval_{name}")) is not None:
            best = float(np.min(metrics[f"eval_{name}"].finite))
            tiles.append((label, f"{value:.4f}", f"held-out, best {best:.4f}"))
        if (value := _last(metrics, f"final_eval_{name}")) is not None:
            tiles.append((f"Final {label[0].lower()}{label[1:]}", f"{value:.4f}", "on all held-out tokens"))
    if (load := _last(metrics, "expert_load")) is not None:
        overload = _last(metrics, "expert_overload")
        layer = _last(metrics, "expert_overload_layer")
        worst = "" if overload is None or layer is None else f"; worst {1 + overload:.2f} in layer {layer:.0f}"
        tiles.append(("Fullest expert", f"{load:.2f}", f"of an even load{worst}"))
    if (tokens := _last(metrics, "tokens")) is not None:
        tiles.append(("Tokens seen", short_number(tokens), ""))
    return tiles


def _speed_tiles(metrics: Mapping[str, Series]) -> list[Tile]:
    tiles: list[Tile] = []
    if (rate := _median(metrics, "tokens_per_second")) is not None:
        per_device = _median(metrics, "tokens_per_second_per_device")
        note = f"{short_number(per_device)} per device, median" if per_device is not None else "median"
        tiles.append(("Tokens per second", short_number(rate), note))
    if (flops := _median(metrics, "model_tflops_per_device")) is not None:
        mfu = _median(metrics, "mfu")
        note = f"MFU {100 * mfu:.1f} %, median" if mfu is not None else "median"
        tiles.append(("TFLOP/s per device", short_number(flops), note))
    if (peak := _last(metrics, "peak_memory_bytes")) is not None:
        tiles.append(("Peak memory", byte_size(peak), "of the fullest device"))
    seconds = metrics.get("step_time_seconds")
    if seconds is not None and seconds.finite.size:
        known = np.nan_to_num(seconds.values)
        steps = np.diff(seconds.steps, prepend=0.0)
        note = f"{short_number(float(np.median(seconds.finite)))} s a step"
        tiles.append(("Time in steps", duration(float(np.sum(known * steps))), note))
    if (share := _last(metrics, "goodput")) is not None:
        tiles.append(("Goodput", f"{100 * share:.1f} %", "of the wall time since the first start"))
    return tiles


def _last(metrics: Mapping[str, Series], key: str) -> float | None:
    return metrics[key].last if key in metrics else None


def _median(metrics: Mapping[str, Series], key: str) -> float | None:
    series = metrics.get(key)
    return float(np.median(series.finite)) if series is not None and series.finite.size else None


def _charts(metrics: Mapping[str, Series], environment: Mapping[str, Any]) -> str:
    schedule = _schedule(environment.get("schedule"))
    charts = [*_reward_charts(metrics), _loss_chart(metrics)]
    charts += [*_known_charts(metrics, schedule), *energy_charts(metrics)]
    others = [key for key in metrics if key not in _NOT_PLAIN and not key.startswith("final_eval_")]
    charts += [Chart(key, [Curve(key, metrics[key])]) for key in others[:_MAX_OTHER_CHARTS]]
    figures = [figure for figure in map(render_chart, charts) if figure]
    return f'<h2>Curves</h2><div class="charts">{"".join(figures)}</div>' if figures else ""


def _schedule(points: object) -> Series:
    """Return a run's planned learning rates, [step, rate] in `points`, as a series; malformed entries are skipped."""
    pairs = points if isinstance(points, list) else []
    return make_series(tuple(pair) for pair in pairs if isinstance(pair, list) and len(pair) == 2)


def _reward_charts(metrics: Mapping[str, Series]) -> list[Chart]:
    """Return the curves of rewards and of the seconds of each phase, of a run with reinforcement learning."""
    rewards = metrics.get("reward")
    if rewards is None:
        return []
    empty = make_series([])
    held_out = [Curve("held-out, sampled", metrics.get("eval_reward", empty), "second")]
    held_out.append(Curve("held-out, greedy", metrics.get("eval_reward_greedy", empty), "dashed"))
    looks = {"rollout_seconds": "first", "train_seconds": "second", "reward_seconds": "dashed"}
    phases = [Curve(name.removesuffix("_seconds"), metrics.get(name, empty), look) for name, look in looks.items()]
    curves = [Curve("train", rewards, "faint"), Curve("train, smoothed", smooth(rewards)), *held_out]
    return [Chart("Reward", curves, wide=True), Chart("Phases of a step", phases, "s", from_zero=True)]


def _loss_chart(metrics: Mapping[str, Series]) -> Chart:
    empty = make_series([])
    train = metrics.get("loss", empty)
    held_out = metrics.get("eval_loss", empty)
    mean = metrics.get("mean_loss", empty)
    if mean.finite.size:
        curves = [Curve("train, last step", train, "faint"), Curve("train, mean since the line before", mean)]
        return Chart("Loss", [*curves, Curve("held-out", held_out, "second")], "nats per token", wide=True)
    noisy = train.finite.size >= 100
    curves = [Curve("train", train, "faint" if noisy else "first")]
    if noisy:
        curves.append(Curve("train, smoothed", smooth(train)))
    return Chart("Loss", [*curves, Curve("held-out", held_out, "second")], "nats per token", wide=True)


def _known_charts(metrics: Mapping[str, Series], schedule: Series) -> list[Chart]:
    empty = make_series([])

    def curve(key: str, label: str, factor: float = 1.0, look: str = "first") -> Curve:
        return Curve(label, metrics.get(key, empty).scaled(factor), look)

    memory = metrics.get("peak_memory_bytes", empty)
    large = memory.finite.size and memory.finite.max() >= 2**30
    factor, unit = (2**-30, "GiB") if large else (2**-20, "MiB")
    rates = [Curve("planned", schedule, "dashed"), curve("learning_rate", "used")]
    overload = metrics.get("expert_overload", empty)
    worst = Curve("worst layer", Series(overload.steps, overload.values + 1), "second")
    load = [curve("expert_load", "mean over layers"), worst]
    waiting = curve("data_wait_fraction", "share", 100)
    return [
        Chart("Held-out bits per byte", [curve("eval_bits_per_byte", "held-out")]),
        Chart("Learning rate", rates, from_zero=True),
        Chart("Gradient norm", [curve("grad_norm", "norm")]),
        Chart("Gradient noise scale", [curve("noise_scale", "noise scale")], "tokens"),
        Chart("Entropy of the routers", [curve("router_entropy", "mean over layers")], "nats", from_zero=True),
        Chart("Load of the fullest expert", load, "of an even load", from_zero=True),
        Chart("Assignments that experts dropped", [curve("router_dropped", "dropped", 100)], "%", from_zero=True),
        Chart("Gradient noise", [curve("gradient_signal", "|G|²"), curve("gradient_noise", "S", 1.0, "second")]),
        Chart("Throughput", [curve("tokens_per_second", "all devices")], "tokens/s", from_zero=True),
        Chart("Model FLOPs utilisation", [curve("mfu", "MFU", 100)], "%", from_zero=True),
        Chart("Step time", [curve("step_time_seconds", "step")], "s", from_zero=True),
        Chart("Peak memory", [curve("peak_memory_bytes", "peak", factor)], unit, from_zero=True),
        Chart("Waiting for data", [waiting], "% of the time", from_zero=True),
    ]


def _sections(title: str, sections: object) -> str:
    if not isinstance(sections, Mapping) or not sections:
        return ""
    cards = []
    for key, value in sections.items():
        if value in ({}, []):
            continue
        heading = _SECTION_TITLES.get(str(key), str(key).replace("_", " ").capitalize())
        render = _DRAWN.get(str(key)) if isinstance(value, Mapping) else None
        body = render(value) if render is not None else render_value(value, str(key))
        content = f"<h3>{html.escape(heading)}</h3>{body}"
        cards.append(f'<div class="card">{content}</div>')
    return f"<h2>{html.escape(title)}</h2>{''.join(cards)}"


def _roofline(record: object) -> str:
    """Render the operators on the roofline; empty if the run has no record of them, or a damaged one."""
    if not isinstance(record, Mapping):
        return ""
    try:
        return f'<h2>Roofline</h2><div class="card">{render_roofline(record)}</div>'
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return ""


def _details(config_text: str, environment: Mapping[str, Any]) -> str:
    parts = []
    if config_text:
        shown = html.escape(config_text[:_MAX_TEXT]) + ("\n..." if len(config_text) > _MAX_TEXT else "")
        summary = "<summary>Configuration (config.yaml)</summary>"
        parts.append(f'<details class="card" open>{summary}<pre>{shown}</pre></details>')
    known = {key: value for key, value in environment.items() if key not in _SHOWN_ELSEWHERE}
    if known:
        parts.append(f'<details class="card"><summary>Environment</summary>{render_value(known)}</details>')
    return f"<h2>Configuration and environment</h2>{''.join(parts)}" if parts else ""
