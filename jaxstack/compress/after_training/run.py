"""Compresses the model of a run or a Hugging Face checkpoint, and writes it as a run directory."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jaxstack.checkpoint.compressed import (
    dense_parameter,
    named_leaves,
    stored_bytes,
    unpack_vectors,
    write_compressed,
)
from jaxstack.compress.after_training.calibrate import read_calibration
from jaxstack.compress.after_training.from_disk import DiskCompression
from jaxstack.compress.after_training.layerwise import LayerwiseResult, compress_layers
from jaxstack.compress.after_training.report import CompressionReport, WeightRow, write_report
from jaxstack.compress.after_training.stored_weights import as_stored, describe_weight, layer_name
from jaxstack.compress.base import AfterTraining, DuringTraining, compress_weight, method_name
from jaxstack.compress.config import CompressionConfig, Recipe, choose_methods, load_recipe
from jaxstack.compress.matrix import MatrixLayout, compressible_weights, forward_order_key, other_parameters
from jaxstack.config.loader import build_component, dump_yaml
from jaxstack.config.sections import RunSection
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.decode import Params
from jaxstack.decoding.decoder import Decoder
from jaxstack.distill import DistillConfig
from jaxstack.errors import ConfigError
from jaxstack.files import check_new, new_directory, write_file
from jaxstack.heartbeat import doing
from jaxstack.models.adapters import AdapterConfig
from jaxstack.parameter_paths import match, nest
from jaxstack.preference import PreferenceConfig
from jaxstack.run.convert import converted_config
from jaxstack.run.evaluate import TextLoss, TextOptions, measure_loss, on_one_device, open_evaluation
from jaxstack.run.load import load_decoder, run_config
from jaxstack.run.setting import with_evaluation_layout
from jaxstack.run_config import RunConfig
from jaxstack.stored import StoredModel
from jaxstack.stored.model import copy_stop_tokens, initial_variables

Leaves: TypeAlias = dict[str, Any]
"""Parameters by path: arrays, or packed weights."""
Measure: TypeAlias = Callable[[Leaves, int | None], TextLoss]
"""(parameters, token limit) -> loss on the held-out text."""


_AXES = ("parallel.data", "parallel.fsdp", "parallel.tensor")
"""Settings of `CompressOptions.layout`."""


@dataclasses.dataclass(frozen=True)
class CompressOptions:
    """Options of `compress`: which checkpoint to compress, and on which text to measure the loss.

    Attributes:
      step: step of the checkpoint to compress; None: the newest.
      text: held-out text; a Hugging Face checkpoint has none of its own, and is not evaluated without.
      layer_tokens: tokens of held-out text on which each layer's own loss is measured; 0: it is not.
      from_disk: read, compress and write one layer after the other, for a model larger than the memory; a Hugging Face
        checkpoint, of which no loss is measured.
      layout: settings of `parallel`, such as `parallel.tensor=2`, for a model larger than a device: weights and
        calibration are split over the devices, and no loss is measured; empty: one device.
    """

    step: int | None = None
    text: TextOptions = TextOptions()
    layer_tokens: int = 8192
    from_disk: bool = False
    layout: Sequence[str] = ()

    def check(self) -> None:
        """Raise ConfigError if these options do not go together, or `layout` has axes that are not for compression."""
        if self.from_disk and self.text.paths:
            raise ConfigError("--data measures losses with the whole model in memory; leave it out with --from-disk.")
        if other := [word for word in self.layout if word.partition("=")[0] not in _AXES]:
            raise ConfigError(f"models are compressed with {', '.join(_AXES)} only; leave out {' '.join(other)}.")
        if self.layout and self.text.paths:
            raise ConfigError(
                f"--data measures losses on one device; leave it out with {' '.join(self.layout)}, and run "
                "jaxstack.evaluate on the result, which takes parallel.data and parallel.tensor."
            )


def compress(
    directory: str | Path,
    recipe: str | Recipe,
    output: str | Path,
    options: CompressOptions | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> CompressionReport:
    """Compress a model; write it to `output`, a run directory with `compressed/` in place of checkpoints.

    Args:
      directory: run directory or Hugging Face checkpoint. Adapters are merged first; of weights that a run trained with
        rounding, the unrounded values are compressed.
      recipe: name of a recipe that comes with jaxstack, YAML file, or recipe.
      output: directory to write; must not exist, or be empty.
      options: checkpoint, and held-out text to measure on.
      report: called with each line of progress and each warning.

    Returns:
      Bytes, errors and losses before and after; `output` holds it as compression.json and report.html.

    Raises:
      ConfigError: the recipe has a mistake or does not fit the model, `output` exists, or text is given with
        `from_disk` or `layout`.
      JaxstackError: there is no checkpoint.
    """
    directory = Path(directory)
    output = Path(output)
    options = options or CompressOptions()
    options.check()
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    stored = StoredModel.open(directory, report)
    source = run_config(stored)
    _check_directories(stored, output, options.step)
    layouts = compressible_weights(source.model)
    methods = choose_methods(recipe, layouts, other_parameters(source.model))
    report(f"compressing {len(methods)} of {len(layouts)} weights")
    for warning in other_rounding_warnings(source.compression.rules, methods):
        report(warning)
    if source.model.moe is not None:
        report(f"no method compresses routers; they are stored in {recipe.store}")
    if any(layouts[path].stack and method.rounds_inputs for path, method in methods.items()):
        report("the inputs of experts are not rounded; their weights are stored in 8 bits")
    tokenizer = _tokenizer(stored, report)
    config = _compressed_config(source, stored, output, tokenizer)
    batches = _calibration(methods, stored, source, recipe, report)
    step = stored.choose_step(options.step)
    # In float32, with layers unrolled and adapters merged. Weights that training rounded are taken as the optimizer
    # stored them: rounding a second time has other scales, and other results.
    placed = run_config(stored, [*(options.layout or ["parallel.data=1"]), "precision.compute=float32"])
    if options.from_disk:
        work = DiskCompression(stored, placed, methods, layouts, recipe, report)
        with new_directory(output) as folder:
            with doing("compressing"):
                result = work.write(folder, batches, step)
            _write_files(folder, result, recipe, config, tokenizer, stored)
        return result
    with doing("loading the model"):
        decoder = load_decoder(stored, placed, step=options.step, form="master", layout_chosen=True)
    # The text and the output are opened before the work, so that a mistake in either is found at once.
    measure = None
    if decoder.rules.mesh.size > 1:
        report("no loss is measured on several devices; run jaxstack.evaluate on the result")
    elif tokenizer is not None:
        measure = _open_measure(config, stored, options.text, report)
    with new_directory(output) as folder:
        with doing("compressing"):
            weights = _compress_weights(decoder, methods, layouts, batches, recipe, report)
        result = _describe(directory, step, weights, methods, layouts, measure, options, report)
        with doing(f"writing {output}"):
            ordered = dict(sorted(weights.stored.items(), key=lambda item: forward_order_key(item[0])))
            write_compressed(folder, nest(ordered.items()), step)
        _write_files(folder, result, recipe, config, tokenizer, stored)
    return result


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Parameters by path before and after a compression.

    Attributes:
      before: float32 parameters.
      after: the same with packed and pruned weights.
      stored: `after` with plain matrices in the dtype of the recipe, as written.
      output_errors: relative squared errors of the outputs of layers, where calibration measured them.
      expert_tokens: calibration tokens of each expert, by the path of the mixture, where calibration counted them.
    """

    before: Leaves
    after: Leaves
    stored: Leaves
    output_errors: Mapping[str, float]
    expert_tokens: Mapping[str, list[int]]


def _describe(
    directory: Path,
    step: int,
    weights: _Weights,
    methods: Mapping[str, AfterTraining],
    layouts: Mapping[str, MatrixLayout],
    measure: Measure | None,
    options: CompressOptions,
    report: Callable[[str], None],
) -> CompressionReport:
    """Measure a compressed model and return the report of its sizes, errors and losses."""
    before = weights.before
    stored = weights.stored
    errors = weights.output_errors
    with doing("comparing weights"):
        rows = [
            describe_weight(path, methods.get(path), layouts[path], before[path], stored[path], errors.get(path))
            for path in layouts
        ]
    limit = options.text.max_tokens
    return CompressionReport(
        source=str(directory),
        step=step,
        bytes_before=sum(2 * leaf.size for leaf in before.values()),
        bytes_after=sum(map(stored_bytes, stored.values())),
        loss_before=None if measure is None else measure(before, limit),
        loss_after=None if measure is None else measure(stored, limit),
        rows=rows,
        loss_by_layer=_losses_by_layer(before, weights.after, rows, measure, options.layer_tokens, report),
        expert_tokens=dict(weights.expert_tokens),
    )


def _calibration(
    methods: Mapping[str, AfterTraining],
    stored: StoredModel,
    source: RunConfig,
    recipe: Recipe,
    report: Callable[[str], None],
) -> Sequence[Mapping[str, Any]]:
    """Return batches of calibration text for the compression methods; an empty list if none of them needs it."""
    if not any(method.needs for method in methods.values()):
        return []
    return read_calibration(stored, source, recipe.calibration, report)


def _compress_weights(
    decoder: Decoder,
    methods: Mapping[str, AfterTraining],
    layouts: Mapping[str, MatrixLayout],
    batches: Sequence[Mapping[str, Any]],
    recipe: Recipe,
    report: Callable[[str], None],
) -> _Weights:
    """Return the parameters before and after compressing each weight that has a method, and as they will be stored."""
    before = named_leaves(decoder.params)
    found = LayerwiseResult()
    if batches:
        model = decoder.module.merge(decoder.params, decoder.non_params)
        tokens = recipe.calibration.expert_tokens
        found = compress_layers(model, batches, methods, rules=decoder.rules, expert_tokens=tokens, report=report)
        after = {**before, **found.weights}
    else:
        after = compress_leaves(before, methods, layouts, report)
    stored = {path: as_stored(leaf, recipe) for path, leaf in after.items()}
    return _Weights(before, after, stored, found.output_errors, found.expert_tokens)


def _check_directories(stored: StoredModel, output: Path, step: int | None) -> None:
    check_new(output)
    if stored.packed and not stored.exported:
        raise ConfigError(f"{stored.directory} is compressed already; compress the run that it was made from.")
    stored.check_step(step)


def compress_leaves(
    leaves: Mapping[str, Any],
    methods: Mapping[str, AfterTraining],
    layouts: Mapping[str, MatrixLayout],
    report: Callable[[str], None] = lambda line: None,
) -> Leaves:
    """Compress, without calibration, each weight that `methods` names; return all parameters by path.

    Args:
      leaves: float32 parameters of an unrolled model.
      methods: method of each weight to compress.
      layouts: these weights as matrices.
      report: called with a line for each.
    """
    after = dict(leaves)
    for number, (path, method) in enumerate(methods.items(), 1):
        report(f"[{number}/{len(methods)}] {path}: {method_name(method)}")
        after[path] = compress_weight(leaves[path], method, layouts[path])
    return after


def _losses_by_layer(
    before: Leaves,
    after: Leaves,
    rows: Sequence[WeightRow],
    measure: Measure | None,
    tokens: int,
    report: Callable[[str], None],
) -> dict[str, float]:
    """Return layer -> held-out loss with only that layer compressed; `none` -> loss of the uncompressed model."""
    changed = [path for path in after if after[path] is not before[path]]
    layers = dict.fromkeys(row.layer for row in rows if any(layer_name(path) == row.layer for path in changed))
    if measure is None or not tokens or not layers:
        return {}
    found = {"none": measure(before, tokens).loss}
    for layer in layers:
        own = {path: dense_parameter(path, after[path]) for path in changed if layer_name(path) == layer}
        found[layer] = measure({**before, **own}, tokens).loss
        report(f"loss with layer {layer} alone compressed: {found[layer]:.4f}, without {found['none']:.4f}")
    return found


def _open_measure(
    config: RunConfig, stored: StoredModel, text: TextOptions, report: Callable[[str], None]
) -> Measure | None:
    if not text.paths and not stored.held_out_text:
        report(
            f"{stored.directory} has no held-out text of its own, so that no loss is measured; give some with --data"
        )
        return None
    trainer, data = open_evaluation(with_evaluation_layout(config, 1, chosen=False), stored, text, report)
    non_params = initial_variables(trainer.module)

    def measure(leaves: Leaves, max_tokens: int | None) -> TextLoss:
        params: Params = nest(unpack_vectors(leaves).items())
        with doing("measuring the loss"):
            return measure_loss(trainer, data, params, non_params, max_tokens)

    return measure


def _tokenizer(stored: StoredModel, report: Callable[[str], None]) -> Tokenizer | None:
    try:
        return stored.tokenizer
    except ConfigError as error:
        report(str(error))
        return None


def _compressed_config(config: RunConfig, stored: StoredModel, output: Path, tokenizer: Tokenizer | None) -> RunConfig:
    """Return the run configuration of a compressed model: no adapters, training in compressed form, teacher or FP8."""
    model = config.model.model_copy(update={"scan_layers": False, "unscanned_end_layers": 0})
    if stored.exported:
        return converted_config(output, model, tokenizer)
    named = {"name": output.name, "dir": str(output.parent), "seed": config.run.seed}
    plain = {"fp8": "none", "fp8_rules": ()}
    return on_one_device(config).model_copy(
        update={
            "run": build_component(RunSection, named, str(output)),
            "model": model,
            "precision": config.precision.model_copy(update=plain),
            "adapters": AdapterConfig(),
            "compression": CompressionConfig(),
            "distill": DistillConfig(),
            "preference": PreferenceConfig(),
        }
    )


def _write_files(
    folder: Path,
    result: CompressionReport,
    recipe: Recipe,
    config: RunConfig,
    tokenizer: Tokenizer | None,
    source: StoredModel,
) -> None:
    """Write what a compressed model has besides its weights: tokenizer, report and configuration."""
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer")
    copy_stop_tokens(source, folder)
    write_report(folder, result, dump_yaml(recipe))
    write_file(folder / "config.yaml", dump_yaml(config).encode())


def other_rounding_warnings(rules: Sequence[DuringTraining], methods: Mapping[str, AfterTraining]) -> Iterator[str]:
    """Yield a warning for each method of a recipe that changes values which training has rounded.

    A warning names the weights, and the recipe's rule that rounds as training did.

    Args:
      rules: `compression.rules` of the run.
      methods: path of each weight to compress -> its method in the recipe.
    """
    table = [*((rule.path, rule.after_training) for rule in rules), (".*", None)]
    paths: dict[tuple[AfterTraining, AfterTraining], list[str]] = {}
    for path, method in methods.items():
        trained = match(path, table)
        same = None if trained is None else trained.model_copy(update={"path": method.path})
        if same is not None and same != method:
            paths.setdefault((same, method), []).append(path)
    for (same, method), found in paths.items():
        settings = {name: value for name, value in same.model_dump().items() if value is not None}
        first = {"path": settings.pop("path"), "method": settings.pop("method")}
        rule = ", ".join(f"{name}: {value}" for name, value in {**first, **settings}.items())
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield (
            f"warning: this run was trained with rounded weights, whose values {method_name(method)} changes: "
            f"{found[0]}{more}. The rule {{{rule}}} keeps the trained values."
        )
