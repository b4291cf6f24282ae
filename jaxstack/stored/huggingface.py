"""A Hugging Face checkpoint (config.json and safetensors files), plain or quantized, as a stored model."""

from pathlib import Path
from typing import Any

import jax

from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.files import CONFIG
from jaxstack.models.huggingface.load import ModelParts, read_parameters
from jaxstack.models.huggingface.quantization_config import is_quantized
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import AxisRules
from jaxstack.stored.model import (
    GENERATION_FILE,
    Form,
    Params,
    StoredLayers,
    StoredModel,
    initial_variables,
    read_stop_tokens,
)
from pallas_kernels import PackedWeight

SEQUENCE_LENGTH = 1024
"""Sequence length in the configuration of a checkpoint, unless the model has fewer positions."""


class HuggingFaceCheckpoint(StoredModel):
    """A directory with config.json and safetensors files, as `transformers` writes it."""

    marker = CONFIG
    title = "a Hugging Face checkpoint"
    exported = True

    @classmethod
    def is_in(cls, directory: Path) -> bool:
        # A run may have a config.json too, if somebody exported it into its own directory.
        return (directory / CONFIG).is_file() and not (directory / "config.yaml").is_file()

    @property
    def held_out_text(self) -> bool:
        return False

    def read_model(self) -> ModelConfig:
        return read_model_config(self.directory)

    def settings(self) -> dict[str, Any]:
        length = min(SEQUENCE_LENGTH, self.model.max_position_embeddings or SEQUENCE_LENGTH)
        tree: dict[str, Any] = {"run": {"init_from": str(self.directory)}, "train": {"sequence_length": length}}
        if self.packed:
            tree["model"] = {"scan_layers": False}  # packed weights are not stacked
        return tree

    @property
    def tokenizer_folder(self) -> Path:
        return self.directory

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return read_stop_tokens(self.directory, (GENERATION_FILE, CONFIG))

    @property
    def packed(self) -> bool:
        return is_quantized(self.directory)

    def choose_step(self, step: int | None) -> int:
        if step is not None:
            raise ConfigError(f"{self.directory} is a Hugging Face checkpoint, which has no steps; leave --step out.")
        return 0

    def describe(self, step: int | None = None) -> str:
        del step
        return f"the weights in {self.directory}"

    def read(
        self,
        wanted: Params,
        model: ModelConfig | None = None,
        *,
        form: Form = "plain",
        step: int | None = None,
        direct_storage: bool = False,
    ) -> Params:
        self.choose_step(step)
        layout = jax.tree.map(lambda x: x.sharding, wanted)
        found = read_parameters(
            self.directory,
            model or self.model,
            layout,
            packed=form == "packed",
            direct_storage=direct_storage,
            report=self.report,
        )

        def cast(like: jax.ShapeDtypeStruct, x: jax.Array | PackedWeight) -> jax.Array | PackedWeight:
            return x if isinstance(x, PackedWeight) else x.astype(like.dtype)

        return jax.tree.map(cast, wanted, found)

    def read_state(self, module: ModuleArrays, rules: AxisRules, step: int | None = None) -> tuple[Params, Params]:
        self.choose_step(step)
        model = module.abstract_module.config
        shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
        params = read_parameters(self.directory, model, shardings, packed=True, report=self.report)
        return params, initial_variables(module)

    def open_layers(self, model: ModelConfig) -> StoredLayers:
        if self.packed:
            raise ConfigError(
                f"single layers are read as plain weights, and those of {self.directory} are quantized; leave out "
                "--resident-layers or --from-disk."
            )
        return ModelParts(self.directory, model)
