"""The coordinate check of muP: sizes of activations after a few training steps, compared over model widths.

With muP they stay as they are at the base width; in the standard parametrization they grow (Yang et al. 2022,
arXiv:2203.03466, appendix D.1).
"""

import argparse
import contextlib
import dataclasses
import html
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.cli import CommandParser, add_examples, run_command, tolerate_broken_pipe
from jaxstack.data.build_shards import available_cores
from jaxstack.data.loader import Data, open_data
from jaxstack.errors import ConfigError, cannot_write
from jaxstack.files import write_file
from jaxstack.models import ModelConfig, Transformer
from jaxstack.optim.schedules import Constant
from jaxstack.run.build import make_trainer, resolve_model
from jaxstack.run.setting import Setting
from jaxstack.run_config import RunConfig, config_from_tree, load_config

PARAMETRIZATIONS = ("standard", "mup")
QUANTITIES = ("embedding", "residual", "logits")
"""Mean magnitudes that are measured: of embeddings, of the residual stream that leaves the layers, of logits."""


@dataclasses.dataclass(frozen=True)
class CoordinateCheckResult:
    """Result of a coordinate check of muP: magnitudes of activations at each model width.

    Attributes:
      widths: hidden sizes.
      steps: number of optimizer steps taken before the measurement.
      values: (parametrization, quantity) -> mean magnitude at each width.
    """

    widths: tuple[int, ...]
    steps: int
    values: Mapping[tuple[str, str], tuple[float, ...]]

    def growth(self, parametrization: str, quantity: str) -> float:
        """Return by what factor a quantity's magnitude grows from the smallest to the largest width."""
        found = self.values[parametrization, quantity]
        return found[-1] / found[0]


def widen(model: ModelConfig, width: int) -> ModelConfig:
    """Scale a model configuration to another width, with heads and MLP size in proportion and the same head_dim.

    Args:
      model: the model at the base width.
      width: the new hidden_size.

    Raises:
      ConfigError: a size would not be a whole number.
    """

    sizes = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.kv_heads,
        "intermediate_size": model.feed_forward_size,
        **({} if model.moe is None else {"moe_intermediate_size": model.expert_size}),
    }
    for name, size in sizes.items():
        if size * width % model.hidden_size:
            smallest = model.hidden_size // math.gcd(model.hidden_size, *sizes.values())
            raise ConfigError(
                f"a width of {width} is {width / model.hidden_size:g} times model.hidden_size ({model.hidden_size}), "
                f"and {name} ({size}) times that is no whole number; choose multiples of {smallest}."
            )
    scaled = {name: size * width // model.hidden_size for name, size in sizes.items()}
    changed: dict[str, object] = {"hidden_size": width, "head_dim": model.width_per_head, **scaled}
    if model.moe is not None:
        changed["moe"] = model.moe.model_copy(update={"moe_intermediate_size": changed.pop("moe_intermediate_size")})
    return model.model_copy(update=changed)


def config_at_width(config: RunConfig, width: int, parametrization: str) -> RunConfig:
    """Return a run's configuration with its model at another width; for muP, the original width is the base width.

    Raises:
      ConfigError: the model or the optimizer has no rule for muP.
    """
    model = widen(config.model, width).model_dump(mode="json", exclude_unset=False)
    model |= {"parametrization": parametrization, "preset": None}
    model["base_width"] = config.model.hidden_size if parametrization == "mup" else None
    tree = {**config.model_dump(mode="json", by_alias=True), "model": model}
    return config_from_tree(tree, f"the configuration at width {width}")


def check_coordinates(
    config: RunConfig, widths: Sequence[int] | None = None, steps: int = 5, *, report: Callable[[str], None] = print
) -> CoordinateCheckResult:
    """Train the model for a few steps at several widths, with and without muP, and measure its activations.

    Args:
      config: the run at its base width, `model.hidden_size`. Its schedule is not used: the learning rate is constant.
      widths: hidden sizes; default: 1, 2, 4 and 8 times the base width.
      steps: number of steps before the measurement.
      report: called with each line of progress.

    Raises:
      ConfigError: a width does not suit, or muP cannot hold for this model or optimizer.
    """
    widths = tuple(sorted(set(widths or [config.model.hidden_size * m for m in (1, 2, 4, 8)])))
    if len(widths) < 2 or widths[0] < 1 or steps < 1:
        raise ConfigError("a coordinate check needs two widths or more (--widths 64,128,256) and one step or more.")
    config = Setting.of(config, "train").config
    length = config.train.sequence_length
    seed = config.run.seed
    data = open_data(config.data, sequence_length=length, seed=seed, report=report, workers=available_cores())
    config = config.model_copy(
        update={
            "model": resolve_model(config.model, data.tokenizer.vocab_size),
            "schedule": Constant(),
            "train": config.train.model_copy(update={"steps": steps}),
        }
    )
    runs = {(p, w): config_at_width(config, w, p) for p in PARAMETRIZATIONS for w in widths}
    found: dict[tuple[str, str], list[float]] = {(p, q): [] for p in PARAMETRIZATIONS for q in QUANTITIES}
    for (parametrization, width), run in runs.items():
        sizes = _measure(run, data, steps)
        for quantity, size in sizes.items():
            found[parametrization, quantity].append(size)
        report(f"{parametrization} {width}: " + ", ".join(f"{name} {size:.3g}" for name, size in sizes.items()))
    return CoordinateCheckResult(widths, steps, {key: tuple(values) for key, values in found.items()})


def _measure(config: RunConfig, data: Data, steps: int) -> dict[str, float]:
    trainer = make_trainer(config, data)
    with contextlib.closing(trainer.batches(0)) as batches:
        for _ in range(steps):
            batch, _ = next(batches)
            trainer.train_step(batch)
    host = next(data.batches(global_batch_size=config.train.global_batch_size, rows=np.arange(1), start=0))

    def sizes(params: dict[str, object], non_params: dict[str, object], tokens: jax.Array) -> dict[str, jax.Array]:
        model = trainer.module.merge(params, non_params)
        assert isinstance(model, Transformer)
        found = {"embedding": model.embedding(tokens, model.dtype), "logits": model(tokens)}
        setattr(model, "final_norm", lambda x: x)  # noqa: B010 (the residual stream is the input of the final norm)
        found["residual"] = model.hidden(tokens)
        return {name: jnp.mean(jnp.abs(found[name].astype(jnp.float32))) for name in QUANTITIES}

    state = trainer.state
    values = jax.jit(sizes)(state.params, state.non_params, jnp.asarray(host["tokens"]))
    return {name: float(values[name]) for name in QUANTITIES}


_PANEL = 300
_MARGIN = 56
_COLOURS = ("#4269d0", "#efb118", "#ff725c")


def draw(found: CoordinateCheckResult) -> str:
    """Return the result of the check as an SVG drawing: activation magnitude over width, with and without muP."""
    values = [value for series in found.values.values() for value in series if value > 0]
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    width = 2 * (_PANEL + _MARGIN) + _MARGIN
    height = _PANEL + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, parametrization in enumerate(PARAMETRIZATIONS):
        left = _MARGIN + index * (_PANEL + _MARGIN)
        parts.append(_panel(found, parametrization, left, (low, max(high, low + 1))))
    for index, (name, colour) in enumerate(zip(QUANTITIES, _COLOURS, strict=True)):
        x = _MARGIN + 120 * index
        parts.append(f'<path d="M{x} {height - 12}h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 26}" y="{height - 8}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(found: CoordinateCheckResult, parametrization: str, left: int, decades: tuple[int, int]) -> str:
    low, high = decades
    first = math.log2(found.widths[0])
    last = math.log2(found.widths[-1])
    x = [left + _PANEL * (math.log2(width) - first) / (last - first) for width in found.widths]

    def place(value):
        return _MARGIN + _PANEL * (high - math.log10(max(value, 10.0**low))) / (high - low)

    title = html.escape(f"{parametrization}: mean magnitude after {found.steps} steps")
    parts = [f'<text x="{left}" y="{_MARGIN - 16}" font-weight="600">{title}</text>']
    for decade in range(low, high + 1):
        y = place(10.0**decade)
        parts.append(f'<path d="M{left} {y:.1f}h{_PANEL}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    for at, width in zip(x, found.widths, strict=True):
        parts.append(f'<text x="{at:.1f}" y="{_MARGIN + _PANEL + 18}" text-anchor="middle">{width}</text>')
    for quantity, colour in zip(QUANTITIES, _COLOURS, strict=True):
        series = found.values[parametrization, quantity]
        points = " ".join(f"{a:.1f},{place(value):.1f}" for a, value in zip(x, series, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "\n".join(parts)


def make_parser() -> CommandParser:
    """Return the parser of the subcommand's arguments."""
    parser = CommandParser(
        prog="jaxstack tune coordinates",
        description="Check muP: train a few steps at several widths, in the standard parametrization and in muP, and "
        "draw the sizes of the activations. With muP they do not depend on the width.",
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file of the run at its base width")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the file's")
    parser.add_argument(
        "--widths", metavar="N,N,...", type=_widths, help="values of model.hidden_size (default: 1, 2, 4 and 8 times)"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps before the measurement (5)")
    parser.add_argument("--output", metavar="FILE", help="SVG file (default: coordinates.svg in the run directory)")
    return add_examples(
        parser,
        "tune coordinates --config configs/quickstart.yaml",
        "tune coordinates --config configs/quickstart.yaml optimizer.name=muon --widths 128,256,512",
    )


def _widths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"whole numbers with commas between them, as in 64,128; got {text}") from None


def run(arguments: argparse.Namespace) -> None:
    """Run the coordinate check of muP with the parsed command-line arguments."""
    config = load_config(arguments.config, arguments.overrides).one_worker
    path = Path(arguments.output) if arguments.output else config.directory / "coordinates.svg"
    found = check_coordinates(config, arguments.widths, arguments.steps, report=lambda line: print(line, flush=True))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, draw(found).encode(), durable=False)
    except OSError as error:
        raise cannot_write(path, error) from None
    times = found.widths[-1] / found.widths[0]
    for parametrization in PARAMETRIZATIONS:
        grown = ", ".join(f"{name} x {found.growth(parametrization, name):.2f}" for name in QUANTITIES)
        print(f"{parametrization}, width x {times:g}: {grown}")
    print(f"picture: {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand and return its exit code."""
    arguments = make_parser().parse_intermixed_args(list(sys.argv[1:] if argv is None else argv))
    with tolerate_broken_pipe("jaxstack tune coordinates"):
        return run_command("jaxstack tune coordinates", lambda: run(arguments))
