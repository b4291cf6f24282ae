"""The interface of a model on disk: its configuration, tokenizer, stop tokens and parameters."""

import difflib
import functools
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import jax
import numpy as np
from jaxtyping import Float, Int, PyTree

from jaxstack.config.loader import merge_trees
from jaxstack.data.load_tokenizer import read_tokenizer_file
from jaxstack.data.tokenizer import CONFIG_FILE, MODEL_FILE, Tokenizer
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.files import write_file
from jaxstack.models.config import ModelConfig
from jaxstack.models.restack import restack, same_stacking
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import AxisRules
from pallas_kernels import PackedWeight

Params: TypeAlias = dict[str, Any]
"""Parameters as nested dicts of arrays."""
Form: TypeAlias = Literal["plain", "packed", "master"]
"""Form in which compressed weights are read. `plain`: dense arrays of their compressed values. `packed`: `PackedWeight`
where a weight is stored or computed with so. `master`: the dense arrays that training updates and rounds each step."""
Report: TypeAlias = Callable[[str], None]

GENERATION_FILE = "generation_config.json"
"""Hugging Face's file with the ids that end a text; a converted run has it too."""


class StoredModel(ABC):
    """A model on disk, such as a run or a Hugging Face checkpoint. `StoredModel.open` finds out which kind it is.

    A subclass adds a kind: it implements the abstract members, and `open` knows it once its module is imported.
    """

    kinds: ClassVar[list[type["StoredModel"]]] = []
    marker: ClassVar[str]
    """Name of the file by which a directory of this kind is recognized, for the message about other directories."""
    title: ClassVar[str]
    """Name of the kind in messages, such as "a run directory"."""
    exported: ClassVar[bool] = False
    """True for a checkpoint of another program, which `jaxstack.convert` makes a run of; False for ours."""

    def __init_subclass__(cls, *, register: bool = True) -> None:
        """Make the kind known to `open`; a class that only serves as a base says `register=False`."""
        super().__init_subclass__()
        if register:
            StoredModel.kinds.append(cls)

    def __init__(self, directory: Path, report: Report = warnings.warn):
        self.directory = directory
        self.report = report

    @staticmethod
    def open(directory: str | Path, report: Report = warnings.warn) -> "StoredModel":
        """Open the model in a directory, without reading its parameters.

        Args:
          directory: of a run, a compressed run or a Hugging Face checkpoint.
          report: called with each warning.

        Raises:
          ConfigError: the directory holds no model; the message names similar directories that do.
        """
        path = Path(directory)
        if (found := StoredModel.find(path, report)) is not None:
            return found
        kinds = sorted(StoredModel.kinds, key=lambda kind: kind.exported)  # ours first
        markers = {kind.marker: kind.title for kind in kinds}
        known = " nor ".join(f"{title} (with {marker})" for marker, title in markers.items())
        raise ConfigError(f"{directory} is neither {known}{_similar(path, list(markers)) or '.'}")

    @staticmethod
    def find(directory: Path, report: Report = warnings.warn) -> "StoredModel | None":
        """Return the model in a directory as `open` does, or None if the directory holds no model."""
        return next((kind(directory, report) for kind in StoredModel.kinds if kind.is_in(directory)), None)

    @classmethod
    @abstractmethod
    def is_in(cls, directory: Path) -> bool:
        """Return True if the directory holds a model of this kind."""

    @functools.cached_property
    def model(self) -> ModelConfig:
        """Configuration of the model, with its layers stacked as they are stored."""
        return self.read_model()

    @abstractmethod
    def read_model(self) -> ModelConfig:
        """Read the configuration of the model.

        Raises:
          ConfigError: it cannot be read.
        """

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the configuration of a run with this model as nested dicts, one for each section."""

    @property
    def tokenizer_folder(self) -> Path:
        """Directory with the files of the tokenizer."""
        return self.directory / "tokenizer"

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the model was trained with.

        Raises:
          JaxstackError: there is none, or it is damaged.
        """
        if not self.has_tokenizer:
            raise ConfigError(
                f"{self.directory} has no tokenizer.json, which is needed to encode and decode text; add one."
            )
        return read_tokenizer_file(str(self.tokenizer_folder))

    @property
    def has_tokenizer(self) -> bool:
        """True if the files of a tokenizer are there."""
        return any((self.tokenizer_folder / name).is_file() for name in (MODEL_FILE, CONFIG_FILE))

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end a text, as far as the files say (`eos_token_id`); () if they do not."""
        return read_stop_tokens(self.directory, (GENERATION_FILE,))

    @property
    def held_out_text(self) -> bool:
        """True if the directory says on which text the model was trained, and so has held-out text to evaluate on."""
        return True

    @property
    def packed(self) -> bool:
        """True if some weights are stored packed, such as quantized ones."""
        return False

    @abstractmethod
    def choose_step(self, step: int | None) -> int:
        """Return the training step of the parameters to read: `step`, or that of the newest ones if it is None.

        Raises:
          ConfigError: there are no parameters of `step`.
          JaxstackError: there are no parameters at all.
        """

    def check_step(self, step: int | None = None) -> None:
        """Check, before work that needs the parameters begins, that there are some of this step.

        Raises:
          ConfigError: there are none.
        """
        try:
            self.choose_step(step)
        except JaxstackError as error:
            raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None

    @abstractmethod
    def describe(self, step: int | None = None) -> str:
        """Name the parameters for a message, such as `the parameters of runs/a, step 100`."""

    @abstractmethod
    def read(
        self,
        wanted: Params,
        model: ModelConfig | None = None,
        *,
        form: Form = "plain",
        step: int | None = None,
        direct_storage: bool = False,
    ) -> Params:
        """Read the parameters of the model, with its adapters merged; each device reads its shards only.

        Args:
          wanted: nested dicts of the shape, dtype and sharding of each parameter.
          model: the configuration that `wanted` belongs to, which may stack layers in another way than the stored one;
            default: the stored one.
          form: form of compressed weights; packed ones are sharded as the plain ones would be.
          step: training step of the parameters; default: the newest.
          direct_storage: True reads files of plain weights by GPUDirect Storage where the format and this machine
            support it.

        Returns:
          Nested dicts of arrays, and of `PackedWeight` with the form `packed`.

        Raises:
          ConfigError: there are no parameters of `step`, or they are another model's.
          JaxstackError: the files are damaged.
        """

    @abstractmethod
    def read_state(self, module: ModuleArrays, rules: AxisRules, step: int | None = None) -> tuple[Params, Params]:
        """Read what an evaluation with a training module needs: parameters in its form, and its other variables.

        Args:
          module: the module of a training step, whose weights may be compressed, or in the order of pipeline stages.
          rules: sharding rules of the mesh.
          step: as in `read`.
        """

    def open_parameters(self, step: int | None = None) -> Callable[[str], np.ndarray | PackedWeight]:
        """Return a function that reads one parameter at a time by its path, in the form in which it is stored.

        Adapters are merged into it. The paths are those of the stored model.

        Raises:
          ConfigError: this kind cannot be read so.
        """
        del step
        raise ConfigError(f"{self.directory} is {self.title}, whose parameters are not read one by one.")

    def open_layers(self, model: ModelConfig) -> "StoredLayers":
        """Open the parameters to be read layer by layer, for models that are larger than the devices' memory.

        Args:
          model: configuration of the model, with unrolled layers.

        Raises:
          ConfigError: this kind cannot be read so; the message says what can.
        """
        del model
        raise ConfigError(
            f"single layers are read from the safetensors of a Hugging Face checkpoint; {self.directory} is "
            f"{self.title}. Leave out --resident-layers or --from-disk, or export it first (jaxstack.export)."
        )


class StoredLayers(Protocol):
    """Interface of parameters on disk that are read in parts, such as one layer."""

    def read(self, path: str, dtypes: PyTree) -> PyTree:
        """Read the parameters at or below a path in the parameter tree, in the dtypes given by the tree `dtypes`."""
        ...

    def rows(self, path: str, numbers: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N D"]:
        """Read the given rows of a weight matrix, such as the embeddings of some tokens."""
        ...


def read_stop_tokens(directory: Path, names: Sequence[str]) -> tuple[int, ...]:
    """Return the ids that end a text (`eos_token_id`) from the first of these files that has some; () if none has."""
    for name in names:
        try:
            found = json.loads((directory / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        if ids := [i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int)]:
            return tuple(ids)
    return ()


def copy_stop_tokens(source: StoredModel, output: Path) -> None:
    """Write the ids that end a text of a stored model (`eos_token_id`) to Hugging Face's file for them in `output`."""
    if ids := source.stop_tokens:
        write_file(output / GENERATION_FILE, (json.dumps({"eos_token_id": list(ids)}) + "\n").encode())


def abstract_parameters(module: ModuleArrays, rules: AxisRules) -> Params:
    """Return shapes, dtypes and shardings of a module's parameters, as `StoredModel.read` takes them."""
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rules.sharding(spec)),
        module.abstract_params,
        module.parameter_specs(rules),
    )


def initial_variables(module: ModuleArrays) -> Params:
    """Return the freshly initialized variables of a module that are no parameters."""
    return jax.jit(lambda key: module.init(key)[1])(jax.random.key(0))


def convert(params: Params, wanted: Params, source: ModelConfig, target: ModelConfig) -> Params:
    """Return parameters with their layers stacked as those of `target`, in the dtypes of `wanted`. Traceable."""
    restacked = params if same_stacking(source, target) else restack(params, source, target)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), restacked, wanted)


def fill_in_settings(tree: dict[str, Any], directory: str) -> dict[str, Any]:
    """Fill in missing model and tokenizer settings of a run's configuration from the model that it starts from.

    A directory that no longer exists changes nothing: the run may have its own checkpoint by now.

    Args:
      tree: the configuration as nested dicts.
      directory: `run.init_from` or `run.branch_from`.
    """
    stored = StoredModel.find(Path(directory).expanduser())
    if stored is None:
        return tree
    model = tree.get("model") or {}
    data = tree.get("data") or {}
    if isinstance(model, dict) and model.get("preset") is None:
        # How layers are stacked is for the new run to decide: FP8 keeps the first and the last layer out of the scan.
        known = stored.model.model_dump(mode="json", exclude={"unscanned_end_layers"})
        tree = {**tree, "model": merge_trees(known, model)}
    if isinstance(data, dict) and "tokenizer" not in data and stored.has_tokenizer:
        tokenizer = {"name": "file", "path": str(stored.tokenizer_folder)}
        tree = {**tree, "data": {**data, "tokenizer": tokenizer}}
    return tree


def _similar(directory: Path, markers: Sequence[str]) -> str:
    """Return a hint `; did you mean ...?` for a directory that is wrong but close to a right one, else ""."""
    for above in directory.absolute().parents[:2]:  # such as its checkpoints, or one of them
        if (above / markers[0]).is_file() and directory.is_dir():
            return f"; did you mean {above}?"
    parent = directory if directory.is_dir() else directory.parent
    names = sorted({path.parent.name for name in markers for path in parent.glob(f"*/{name}")})
    if parent == directory:
        close = names[:3]
    else:
        close = difflib.get_close_matches(directory.name, names, cutoff=0.6)
        close = close or [name for name in names if name.lower() == directory.name.lower()]
    return f"; did you mean {' or '.join(str(parent / name) for name in close)}?" if close else ""
