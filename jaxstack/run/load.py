"""Load a trained run or a Hugging Face checkpoint: configuration, tokenizer, and parameters sharded over devices.

`open_window` opens a Hugging Face checkpoint with only a few layers in memory at a time.
"""

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from jaxstack.compress.config import Recipe, load_recipe
from jaxstack.config.base import Component
from jaxstack.config.loader import build_component, merge_overrides, merge_trees
from jaxstack.data.streams import import_chat
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.decode import Params, cast_shapes
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.layer_window import WeightPlace, WindowDecoder
from jaxstack.decoding.pipeline import PipelineDecoder, split_stages, stage_shapes
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.text_stream import ChatGenerator, TextGenerator
from jaxstack.distributed.device_setup import memory_per_device
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.models import ModelConfig, Transformer, with_kv_cache
from jaxstack.models.huggingface.families import check_model
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.module_arrays.views import with_views
from jaxstack.observe.number_format import byte_size
from jaxstack.parallel import ParallelConfig, StepLayout
from jaxstack.precision import PrecisionConfig
from jaxstack.run import generate as generation
from jaxstack.run.build_model import build_model
from jaxstack.run.compress_at_load import choose_at_load, compress_in_place
from jaxstack.run.generate import GeneratedText
from jaxstack.run.setting import Setting
from jaxstack.run_config import RunConfig, config_from_tree
from jaxstack.stored import StoredModel
from jaxstack.stored.model import Form, initial_variables
from jaxstack.stored.run_directory import TrainingRun

if TYPE_CHECKING:  # it needs the optional dependency jinja2
    from jaxstack.data.chat import Chats


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

    def model(self, tokens: Int[ArrayLike, "B T"]) -> Float[Array, "B T V"]:
        """Compute the logits of token ids [B, T], each after the tokens before it, float32 [B, T, V]."""
        return self.decoder.logits(tokens)

    @property
    def module(self) -> ModuleArrays:
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
            generation.generate(
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
    recipe: str | Recipe | None = None,
    serving: bool = False,
    report: Callable[[str], None] = warnings.warn,
) -> Run:
    """Load a trained run or a Hugging Face checkpoint for text generation and evaluation tasks.

    Args:
      directory: run directory, or directory of a Hugging Face checkpoint.
      overrides: `parallel.key=value` and `precision.key=value`; see `run_config`.
      step: step of the checkpoint to load; default: the newest.
      recipe: recipe of `jaxstack compress` without calibration, by its name or its YAML file, by which the weights are
        compressed while they are loaded; default: they are not.
      serving: True joins the devices of `fsdp` and `expert` to those of `tensor`, as an `Engine` needs; see
        `jaxstack.parallel.layout_rules.serving_degrees`.
      report: called with each warning, such as one about a damaged checkpoint that is passed over.

    Raises:
      ConfigError: the directory holds no model or no tokenizer, or an override does not fit.
      JaxstackError: there is no checkpoint, or it is damaged.
    """
    stored = StoredModel.open(directory, report)
    config = run_config(stored, overrides)
    tokenizer = stored.tokenizer
    chosen = sets_layout(overrides)
    compression = load_recipe(recipe) if isinstance(recipe, str) else recipe
    decoder = load_decoder(
        stored,
        config,
        step=step,
        vocab_size=tokenizer.vocab_size,
        layout_chosen=chosen,
        recipe=compression,
        serving=serving,
    )
    return Run(stored.directory, config, stored.choose_step(step), tokenizer, decoder, stop_tokens(stored))


def generate(
    directory: str | Path, prompts: Sequence[str] = ("",), sampling: Sampling | None = None, **settings: Any
) -> list[GeneratedText]:
    """Load a model and generate texts that continue prompts; `load(directory).generate` does so again and again.

    Args:
      directory: run directory, or directory of a Hugging Face checkpoint.
      prompts, sampling, settings: as in `Run.generate`.

    Raises:
      ConfigError: as in `load` and `Run.generate`.
    """
    return load(directory).generate(prompts, sampling, **settings)


def stop_tokens(stored: StoredModel) -> frozenset[int]:
    """Return the ids that end a text of a stored model: those that its files name, and the document start."""
    return frozenset({stored.tokenizer.document_start, *stored.stop_tokens})


def read_run_config(directory: str | Path) -> RunConfig:
    """Read the configuration of a run from its directory.

    Raises:
      ConfigError: the directory is not a run directory.
    """
    stored = StoredModel.find(Path(directory))
    if stored is None or stored.exported:
        raise ConfigError(f"{directory} is not a run directory (it has no config.yaml); runs are at runs/<run.name>.")
    return run_config(stored)


def run_config(stored: StoredModel, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of a run, or one made for the model of another program, with overrides applied.

    Args:
      stored: the model on disk.
      overrides: `parallel.key=value` and `precision.key=value`. With any of `parallel`, the run's own degrees are
        dropped (except for its number of simulated devices).

    Raises:
      ConfigError: it cannot be read, or an override is wrong or of another section.
    """
    config = config_from_tree(stored.settings(), str(stored.directory / stored.marker))
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


def start_parameters(
    directory: str | Path,
    model: ModelConfig,
    wanted: Params,
    report: Callable[[str], None],
    *,
    verb: str = "starting",
    direct_storage: bool = False,
) -> Params:
    """Read the parameters that a new run starts from.

    Args:
      directory: run directory (compressed weights are unpacked), or directory of a Hugging Face checkpoint.
      model: the new run's model; it must compute what the stored one computes, but may stack its layers otherwise.
      wanted: nested dicts of shapes, dtypes and shardings of its parameters; each device reads only its own shard.
      report: called with a line that names the source, and with each warning.
      verb: what the run does from the parameters, for that line.
      direct_storage: True reads a Hugging Face checkpoint by GPUDirect Storage where this machine has it.

    Raises:
      ConfigError: they are another model's; the message names what differs.
      JaxstackError: there are no parameters, or the checkpoint is damaged.
    """
    stored = StoredModel.open(directory, report)
    check_model(model, stored.model, str(directory))
    stored.check_step()
    report(f"{verb} from {stored.describe()}")
    return stored.read(wanted, model, direct_storage=direct_storage)


def load_decoder(
    stored: StoredModel,
    config: RunConfig,
    *,
    step: int | None = None,
    vocab_size: int | None = None,
    form: Form = "packed",
    layout_chosen: bool = False,
    recipe: Recipe | None = None,
    serving: bool = False,
) -> Decoder:
    """Load a stored model for text generation, without its tokenizer; layers are unrolled.

    Args:
      stored: the model on disk.
      config: its configuration, from `run_config`.
      step: step of the checkpoint; default: the newest.
      vocab_size: number of ids that may be generated; default: all rows of the model's vocabulary.
      form: form of compressed weights, see `StoredModel.read`.
      layout_chosen: True takes the degrees of `config.parallel`; False those that suit the model and the devices.
      recipe: compresses the weights as they are loaded, from their unrounded values; None: they stay as they are.
      serving: as in `load`.

    Raises:
      ConfigError: the weights do not fit, are compressed already, or the recipe does not fit the model.
    """
    methods = {} if recipe is None else choose_at_load(recipe, stored, config.model)
    setting = Setting.of(config, "serve" if serving else "decode", chosen=layout_chosen)
    rules = setting.rules
    if rules.mesh.shape["pipeline"] > 1:
        config.model.check_independent_layers("a pipeline", "set parallel.pipeline=1")
    dtype = setting.dtype
    unrolled = config.model.model_copy(update={"scan_layers": False})
    module = ModuleArrays(
        lambda rngs: with_kv_cache(Transformer(unrolled, rngs, dtype=dtype), config.precision.kv_cache)
    )
    stages = split_stages(rules)
    wanted = stage_shapes(module, stages)
    if not stored.packed:
        _check_weights(wanted)
    params = stored.read(wanted, unrolled, form="master" if methods else form, step=step)
    check_finite(params, stored)
    compress_in_place(params, methods, config.model, wanted)
    layout = StepLayout(peer_sums=setting.config.parallel.overlap, axis_rules=setting.axis_rules)
    non_params = initial_variables(module)
    if len(stages) > 1:
        return PipelineDecoder(module, params, non_params, stages, vocab_size=vocab_size, layout=layout)
    return Decoder(module, params, non_params, rules, vocab_size=vocab_size, layout=layout)


def _check_weights(wanted: Params) -> None:
    """Check that each device's memory has room for its part of the weights.

    Raises:
      ConfigError: it has not.
    """
    available = memory_per_device()
    shapes = jax.tree.leaves(wanted)
    on_device = Counter[Any]()
    for x in shapes:
        on_device[x.sharding.mesh] += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    taken = max(on_device.values())
    if available is not None and taken > available:
        raise ConfigError(
            f"the weights take {byte_size(taken)} on each device, which has {byte_size(available)}; use more devices "
            f"(parallel.tensor={-(-taken // available) * shapes[0].sharding.mesh.shape['tensor']} or more), or a "
            "quantized checkpoint."
        )


class RewardHead(NamedTuple):
    """The head of a reward model, with the chats that it was trained on."""

    weights: np.ndarray
    """Map the final hidden state of a text's last token to its reward, [D] float32."""
    chats: "Chats"
    """The tokenizer and the chat template."""

    def encode(self, prompt: str | Sequence[Mapping[str, Any]], answer: str) -> list[int]:
        """Return a prompt (a text or messages) with its answer as token ids, as the model was trained on them.

        Raises:
          ConfigError: the answer is empty, or one of them contains special tokens.
        """
        return import_chat().encode_answer(prompt, answer, self.chats).tolist()


def find_reward_head(directory: str | Path, *, step: int | None = None) -> RewardHead | None:
    """Return the head of a run that trained a reward model; None: the directory holds another model.

    Args:
      directory: run directory, or directory of a Hugging Face checkpoint.
      step: step of the checkpoint; default: the newest.
    """
    stored = StoredModel.open(directory)
    if not isinstance(stored, TrainingRun) or not stored.is_reward_model:
        return None
    return _read_reward_head(stored, step)


def _read_reward_head(stored: TrainingRun, step: int | None) -> RewardHead:
    head = stored.read_reward_head(step)
    return RewardHead(head, import_chat().open_chats(run_config(stored).data.chat, stored.tokenizer))


class RewardModel:
    """A trained reward model, which gives rewards to texts of token ids; see `load_reward_model`.

    Args:
      module: the model with its reward head.
      params: its parameters.
      head: its head, with the chats that it was trained on.
    """

    def __init__(self, module: ModuleArrays, params: Params, head: RewardHead):
        self.tokenizer = head.chats.tokenizer
        self.encode = head.encode
        self._params = params
        non_params = initial_variables(module)
        self._rewards = jax.jit(lambda params, *batch: module.merge(params, non_params).rewards(*batch)[0])

    def __call__(self, sequences: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the reward of each sequence of token ids, [B] float32, read at its last token, the stop token."""
        longest = max(map(len, sequences))
        # Few shapes, for each of which a program is compiled.
        tokens = np.zeros((_power_of_two(len(sequences)), _power_of_two(longest)), np.int32)
        last = np.zeros(len(tokens), np.int32)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)] = ids
            last[row] = len(ids) - 1
        return np.asarray(self._rewards(self._params, tokens, last))[: len(sequences)]


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def load_reward_model(directory: str | Path, overrides: Sequence[str] = (), *, step: int | None = None) -> RewardModel:
    """Load a reward model that was trained with `preference.loss: reward_model`, on one device by default.

    Args:
      directory: its run directory.
      overrides: `parallel.key=value` and `precision.key=value`; see `run_config`.
      step: step of the checkpoint; default: the newest.

    Raises:
      ConfigError: the directory holds no reward model, or an override does not fit.
    """
    stored = StoredModel.open(directory)
    if not isinstance(stored, TrainingRun):
        raise ConfigError(f"{directory} is no run, and so no reward model that jaxstack.train made.")
    head = _read_reward_head(stored, step)
    config = run_config(stored, overrides)
    if not sets_layout(overrides):
        simulated = config.parallel.simulate_devices
        config = config.model_copy(update={"parallel": ParallelConfig(simulate_devices=simulated)})
    setting = Setting.of(config, "decode", chosen=True, local=True)
    unrolled = config.model.model_copy(update={"scan_layers": False})

    def make(rngs: nnx.Rngs) -> Transformer:
        model = Transformer(unrolled, rngs, dtype=setting.dtype)
        model.add_reward_head()
        return model

    module = with_views(make)
    wanted, _ = module.split_added(cast_shapes(module, setting.rules))
    return RewardModel(module, {**stored.read(wanted, unrolled, step=step), "reward_head": head.weights}, head)


def check_finite(params: Params, stored: StoredModel) -> None:
    """Check that all parameters that were read are numbers.

    Raises:
      JaxstackError: one of them holds NaN or infinity; the message names it.
    """
    leaves = [(path, x) for path, x in jax.tree.leaves_with_path(params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    finite = jax.device_get([_all_finite(x) for _, x in leaves])
    broken = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for (path, _), good in zip(leaves, finite, strict=True)
        if not good
    ]
    if broken:
        raise JaxstackError(
            f"the parameters of {stored.directory} must be finite; {len(broken)} of {len(leaves)} hold NaN or "
            f"infinity, the first is {broken[0]}. Take an older checkpoint (--step), or get the files again."
        )


@jax.jit
def _all_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x.astype(jnp.float32)).all()


def sets_layout(overrides: Sequence[str]) -> bool:
    """Return True if a command-line override sets the parallel layout: a key of `parallel` other than `overlap`."""
    section = merge_overrides({}, overrides).get("parallel")
    return isinstance(section, Mapping) and bool(section.keys() - {"overlap"})


def keeps_layout(override: str) -> bool:
    """Return True if a command-line override of the section `parallel` suits every layout: it sets `overlap`."""
    return override.partition("=")[0] == "parallel.overlap"


def open_window(
    directory: str | Path,
    resident_layers: int,
    overrides: Sequence[str] = (),
    *,
    place: WeightPlace = "files",
    report: Callable[[str], None] = warnings.warn,
) -> Run:
    """Open a Hugging Face checkpoint for text generation; its layers are brought to the device when they are needed.

    Args:
      directory: directory with config.json, safetensors and a tokenizer.
      resident_layers: number of layers in device memory at a time, the output head counted as one.
      overrides: `precision.key=value` and `parallel.simulate_devices`; see `jaxstack.run.load.run_config`.
      place: where the weights of the other layers are.
      report: called with a line on the memory that the weights take.

    Raises:
      ConfigError: the directory is a run, several devices are to compute, layers read more than the residual stream, or
        as `jaxstack.run.load.load`.
    """
    if resident_layers < 1:
        raise ConfigError(f"--resident-layers must be at least 1; found {resident_layers}.")
    stored = StoredModel.open(directory, report)
    config = run_config(stored, overrides)
    config.model.check_independent_layers("--resident-layers", "leave it out")
    model = config.model.model_copy(update={"scan_layers": False})
    layers = stored.open_layers(model)
    if math.prod(config.parallel.degrees.values()) > 1:
        raise ConfigError("--resident-layers uses one device; leave the keys of parallel out.")
    setting = Setting.of(config, "decode", chosen=True)
    module = ModuleArrays(build_model(config.model_copy(update={"model": model}), setting.dtype))
    non_params = jax.jit(lambda key: module.init(key)[1])(jax.random.key(0))
    tokenizer = stored.tokenizer
    options = {"resident": resident_layers, "place": place, "vocab_size": tokenizer.vocab_size}
    decoder = WindowDecoder(module, layers, non_params, setting.rules, **options)
    pool = {"files": "", "host": " in host memory", "peers": " in the memory of other devices"}[place]
    report(
        f"{decoder.window_bytes / 1e6:,.1f} of {decoder.total_bytes / 1e6:,.1f} MB of weights in memory at most"
        + (f", {decoder.pool_bytes / 1e6:,.1f} MB{pool}" if pool else "")
    )
    return Run(stored.directory, config, 0, tokenizer, decoder, stop_tokens(stored))
