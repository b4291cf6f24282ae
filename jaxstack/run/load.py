"""Load a trained run or a Hugging Face checkpoint: configuration, tokenizer, and parameters sharded over devices."""

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from flax import nnx

from jaxstack.checkpoint.compressed import is_compressed, named_leaves, read_compressed, with_packed_weights
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.config.base import Component
from jaxstack.config.loader import build_component, merge_trees
from jaxstack.config.overrides import merge_overrides
from jaxstack.data.load_tokenizer import load_tokenizer, read_tokenizer_file
from jaxstack.data.tokenizer import CONFIG_FILE, MODEL_FILE, Tokenizer
from jaxstack.decoding.chat import ChatGenerator
from jaxstack.decoding.decode import Decoder, Params, cast_matrices
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.text_stream import TextGenerator
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.functional.compressed import CompressedModule, compress_in_training
from jaxstack.functional.module import FunctionalModule
from jaxstack.models import ModelConfig, Transformer, unroll_layers, with_kv_cache
from jaxstack.models.huggingface.load import read_parameters
from jaxstack.models.huggingface.quantization_config import is_quantized
from jaxstack.models.pretrained import is_run, read_pretrained_model_config
from jaxstack.parallel import AxisRules, ParallelConfig
from jaxstack.precision.config import PrecisionConfig
from jaxstack.run.build import build_model
from jaxstack.run.generate import GeneratedText, generate
from jaxstack.run.setting import Setting
from jaxstack.run_config import RunConfig, config_from_tree, load_config
from pallas_kernels import PackedWeight

_SEQUENCE_LENGTH = 1024
"""Sequence length in the configuration of a Hugging Face checkpoint, unless the model has fewer positions."""
GENERATION_FILE = "generation_config.json"
"""Hugging Face's file with the ids that end a text; a converted run has it too."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained run or Hugging Face checkpoint, loaded to generate and to score text.

    Attributes:
      directory: run directory, or directory of the Hugging Face checkpoint.
      config: its configuration. `config.parallel` is the layout of training; `decoder.rules` has the mesh in use.
      step: step of the checkpoint; 0 for a Hugging Face checkpoint.
      tokenizer: the tokenizer that the model was trained with.
      decoder: the model with its parameters in the compute dtype, on a mesh.
      stop_tokens: ids that end a text.
    """

    directory: Path
    config: RunConfig
    step: int
    tokenizer: Tokenizer
    decoder: Decoder
    stop_tokens: frozenset[int]

    @property
    def module(self) -> FunctionalModule:
        """The loaded Transformer as pure functions of its parameters; adapters are merged and layers unrolled."""
        return self.decoder.module

    @property
    def parameters(self) -> Params:
        """The model's parameters as nested dicts of arrays."""
        return self.decoder.params

    def text_generator(self, *, document_start: bool = True, chat: bool = False) -> TextGenerator:
        """Return a generator that continues text prompts, or answers them as chat questions.

        Args:
          document_start: begin each text with the tokenizer's document-start id, as in training.
          chat: format each prompt as a question by the tokenizer's chat template, and end where the answer ends.

        Raises:
          ConfigError: `chat`, and the tokenizer has no chat template.
        """
        opening = [self.tokenizer.document_start] if document_start else []
        generator = TextGenerator(self.decoder, self.tokenizer, opening, self.stop_tokens)
        return ChatGenerator(generator) if chat else generator

    def generate(
        self,
        prompts: Sequence[str] = ("",),
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        samples: int = 1,
        seed: int = 0,
        stop: Sequence[str] = (),
        chat: bool = False,
    ) -> list[GeneratedText]:
        """Generate `samples` texts that continue each prompt.

        Args:
          prompts: texts to continue; "" starts a new document.
          sampling: temperature and limits of the choice of tokens; default: `Sampling()`.
          max_tokens: token limit of each text; default: 200, or as many as fit the model's context.
          samples: texts per prompt.
          seed: seed of each prompt's first sample; sample i has seed + i.
          stop: strings that end a text.
          chat: see `text_generator`.

        Raises:
          ConfigError: a prompt is too long, a stop string is empty, or there is no chat template.
        """
        return list(
            generate(
                self.text_generator(chat=chat),
                prompts,
                sampling or Sampling(),
                samples=samples,
                max_tokens=max_tokens,
                seed=seed,
                stop=stop,
            )
        )


def load(
    directory: str | Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    report: Callable[[str], None] = warnings.warn,
) -> Run:
    """Load a trained run or a Hugging Face checkpoint for text generation and evaluation tasks.

    Args:
      directory: run directory, or directory of a Hugging Face checkpoint.
      overrides: `parallel.key=value` and `precision.key=value`; see `read_config`.
      step: step of the checkpoint to load; default: the newest.
      report: called with each warning, such as one about a damaged checkpoint that is passed over.

    Raises:
      ConfigError: the directory holds no model or no tokenizer, or an override does not fit.
      JaxstackError: there is no checkpoint, or it is damaged.
    """
    config = read_config(directory, overrides)
    tokenizer = read_tokenizer(directory)
    decoder, chosen = load_decoder(directory, overrides, step=step, vocab_size=tokenizer.vocab_size, report=report)
    stop_tokens = frozenset({tokenizer.document_start, *read_stop_tokens(directory)})
    return Run(Path(directory), config, chosen, tokenizer, decoder, stop_tokens)


def read_run_config(directory: str | Path) -> RunConfig:
    """Read the configuration of a run from its directory.

    Raises:
      ConfigError: the directory is not a run directory.
    """
    path = Path(directory) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{directory} is not a run directory (it has no config.yaml); runs are at runs/<run.name>.")
    return load_config(path)


def read_config(directory: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration, or make one for a Hugging Face checkpoint, and apply overrides.

    Args:
      directory: run directory, or directory of a Hugging Face checkpoint.
      overrides: `parallel.key=value` and `precision.key=value`. With any of `parallel`, the run's own degrees are
        dropped (except for its number of simulated devices).

    Raises:
      ConfigError: the directory holds neither, or an override is wrong or of another section.
    """
    if is_run(directory):
        config = read_run_config(directory)
    else:
        length = min(
            _SEQUENCE_LENGTH, read_pretrained_model_config(directory).max_position_embeddings or _SEQUENCE_LENGTH
        )
        tree = {"run": {"init_from": str(directory)}, "train": {"sequence_length": length}}
        if is_quantized(directory):
            tree["model"] = {"scan_layers": False}  # packed weights are not stacked
        config = config_from_tree(tree, str(directory))
    changes = merge_overrides({}, overrides)
    if foreign := sorted(changes.keys() - {"parallel", "precision"}):
        raise ConfigError(f"only keys of parallel and precision can be set for a trained model; found {foreign[0]}.")
    simulated = {"simulate_devices": config.parallel.simulate_devices}
    updates: dict[str, Component] = {}
    if "parallel" in changes:
        updates["parallel"] = _overridden(ParallelConfig, "parallel", simulated, changes)
    if "precision" in changes:
        updates["precision"] = _overridden(PrecisionConfig, "precision", config.precision.model_dump(), changes)
    return config.model_copy(update=updates)


def _overridden(
    component: type[Component], name: str, base: Mapping[str, object], changes: Mapping[str, object]
) -> Component:
    return build_component(component, merge_trees({name: base}, {name: changes[name]})[name], name)


def read_tokenizer(directory: str | Path) -> Tokenizer:
    """Read the tokenizer of a run or a Hugging Face checkpoint.

    Raises:
      JaxstackError: there is none, or it is damaged.
    """
    if is_run(directory):
        return load_tokenizer(Path(directory) / "tokenizer")
    if not any((Path(directory) / name).is_file() for name in (MODEL_FILE, CONFIG_FILE)):
        raise ConfigError(f"{directory} has no tokenizer.json, which is needed to encode and decode text; add one.")
    return read_tokenizer_file(str(directory))


def read_stop_tokens(directory: str | Path) -> list[int]:
    """Read the ids that end a text (`eos_token_id`) from a Hugging Face checkpoint's files; [] if there are none."""
    names = (GENERATION_FILE,) if is_run(directory) else (GENERATION_FILE, "config.json")
    for name in names:
        try:
            found = json.loads((Path(directory) / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        ids = found if isinstance(found, list) else [found]
        if ids := [i for i in ids if isinstance(i, int)]:
            return ids
    return []


def choose_step(manager: CheckpointManager, step: int | None) -> int:
    """Return the step of the checkpoint to load: `step`, which must exist, or the newest intact one if it is None.

    Raises:
      ConfigError: there is no checkpoint of `step`.
      JaxstackError: there is no checkpoint at all.
    """
    if step is None:
        latest = manager.latest_step()
        if latest is None:
            raise JaxstackError(f"{manager.directory} holds no checkpoint yet; train the run first.")
        return latest
    steps = manager.all_steps()
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"there is no checkpoint of step {step} in {manager.directory}; there are: {known}.")
    return step


def check_tokenizer(folder: Path, step: int, extra: object) -> None:
    """Check, by its hash, that the tokenizer in `folder` is the one that a checkpoint was trained with.

    Args:
      folder: directory of the tokenizer; without one nothing is checked.
      step: step of the checkpoint, for the message.
      extra: extra data of the checkpoint, whose `data.tokenizer` is the tokenizer's hash.

    Raises:
      JaxstackError: it is another tokenizer.
    """
    data = extra.get("data") if isinstance(extra, dict) else None
    trained = data.get("tokenizer") if isinstance(data, dict) else None
    if trained is not None and folder.is_dir() and load_tokenizer(folder).hash != trained:
        raise JaxstackError(f"{folder} is not the tokenizer of checkpoint {step}: restore its files.")


def restore_parameters(
    directory: str | Path,
    model: ModelConfig,
    module: FunctionalModule,
    rules: AxisRules,
    *,
    step: int | None = None,
    report: Callable[[str], None] = warnings.warn,
) -> tuple[Params, Params, int]:
    """Read the parameters of a run's checkpoint or of Hugging Face files, sharded by `rules`.

    The optimizer state is not read. Compressed models and quantized checkpoints keep their packed weights.

    Args:
      directory: run directory, or directory of a Hugging Face checkpoint.
      model: configuration of the stored model.
      module: functional form of the model.
      rules: sharding rules of the mesh.
      step: step of the run's checkpoint; default: the newest.
      report: called with each warning.

    Returns:
      Parameters, other variables, and the step of the checkpoint (0 for Hugging Face files).
    """
    if not is_run(directory):
        if step is not None:
            raise ConfigError(f"{directory} is a Hugging Face checkpoint, which has no steps; leave --step out.")
        shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
        non_params = jax.jit(lambda key: module.init(key)[1])(jax.random.key(0))
        return read_parameters(directory, model, shardings, packed=True, report=report), non_params, 0
    if is_compressed(directory):
        return _read_compressed(directory, module, rules, step)
    manager = CheckpointManager(Path(directory) / "checkpoints", report=report)
    chosen = choose_step(manager, step)
    stored = module.plain
    specs = stored.parameter_specs(rules)

    def with_sharding(x: jax.ShapeDtypeStruct, spec: jax.P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rules.sharding(spec))

    params = jax.tree.map(with_sharding, stored.abstract_params, specs)
    non_params = jax.tree.map(lambda x: with_sharding(x, jax.P()), stored.abstract_non_params)
    tree, extra = manager.restore(chosen, {"params": params, "non_params": non_params}, subset=True)
    check_tokenizer(Path(directory) / "tokenizer", chosen, extra)
    params = tree["params"]
    non_params = tree["non_params"]
    if not module.stores_plain:
        shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
        from_plain = functools.partial(module.from_plain, wanted=module.abstract_params)
        params = jax.jit(from_plain, out_shardings=shardings)(params)
        non_params = jax.jit(functools.partial(module.from_plain, wanted=module.abstract_non_params))(non_params)
    return params, non_params, chosen


def _read_compressed(
    directory: str | Path, module: FunctionalModule, rules: AxisRules, step: int | None
) -> tuple[Params, Params, int]:
    """Return a compressed model's packed parameters (sharded like unpacked ones), other variables and step."""
    specs = {path: spec for path, spec in named_leaves(module.parameter_specs(rules)).items()}
    on_one = rules.mesh.size == 1
    params, chosen = read_compressed(directory, None if on_one else lambda path, _: specs[path], rules.mesh)
    if step not in (None, chosen):
        raise ConfigError(f"{directory} holds the compressed model of step {chosen} only; leave --step out.")
    non_params = jax.jit(lambda key: module.init(key)[1])(jax.random.key(0))
    return params, non_params, chosen


def load_decoder(
    directory: str | Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    vocab_size: int | None = None,
    master: bool = False,
    report: Callable[[str], None] = warnings.warn,
) -> tuple[Decoder, int]:
    """Load the model of a run or a Hugging Face checkpoint for text generation, without its tokenizer.

    Args:
      directory, overrides, step, report: as of `load`.
      vocab_size: number of ids that may be generated; default: all rows of the model's vocabulary.
      master: True leaves weights that training rounded as the optimizer stored them (`WeightRule.master`), so that
        compression rounds them once.

    Returns:
      The decoder, and the step of its checkpoint.
    """
    config = read_config(directory, overrides)
    setting = Setting.of(config, "decode", chosen=sets_layout(overrides))
    rules = setting.rules
    dtype = setting.dtype
    unrolled = config.model.model_copy(update={"scan_layers": False})
    stored = config.model if is_run(directory) else unrolled  # a run stores its layers stacked as in training
    compression = config.compression.rules if is_run(directory) else ()
    module = compress_in_training(build_model(config.model_copy(update={"model": stored}), dtype), compression)
    params, non_params, chosen = restore_parameters(directory, stored, module, rules, step=step, report=report)
    if config.adapters.rules:
        plain = FunctionalModule(_plain_model(stored, config.precision, dtype))
        layout = jax.tree.map(rules.sharding, plain.parameter_specs(rules))
        merge = jax.jit(module.merge_adapters, out_shardings=layout, donate_argnums=0)
        params = merge(*module.split_adapters(params), non_params)
        module = plain
    packed: dict[str, PackedWeight] = {}
    if isinstance(module, CompressedModule):
        packed = {} if master else module.pack_rounding(params)
        plain = FunctionalModule(_plain_model(stored, config.precision, dtype))
        layout = jax.tree.map(rules.sharding, plain.parameter_specs(rules))
        convert = module.master if master else module.export
        params = jax.jit(convert, out_shardings=layout)(params)
        module = plain
    if stored != unrolled:
        params = cast_matrices(module, params, rules)
        module = FunctionalModule(_plain_model(unrolled, config.precision, dtype))
        shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
        params = jax.jit(functools.partial(unroll_layers, stored), out_shardings=shardings)(params)
    if packed:
        params = with_packed_weights(params, packed, jax.tree.map(rules.sharding, module.parameter_specs(rules)))
    return Decoder(module, params, non_params, rules, vocab_size=vocab_size), chosen


def _plain_model(
    model: ModelConfig, precision: PrecisionConfig, dtype: jax.typing.DTypeLike
) -> Callable[[nnx.Rngs], Transformer]:
    """Return a function that creates the model without adapters, with its KV cache in the configured format."""
    return lambda rngs: with_kv_cache(Transformer(model, rngs, dtype=dtype), precision.kv_cache)


def sets_layout(overrides: Sequence[str]) -> bool:
    """Return True if a command-line override sets the parallel layout (a key of the section `parallel`)."""
    return any(override.startswith("parallel.") for override in overrides)
