"""Sources of exports made of the checkpoints that transformers wrote, with what it computes for them."""

from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.export.source import Source
from jaxstack.models import Transformer
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.load import read_parameters
from jaxstack.module_arrays.module import ModuleArrays
from tests.word_models import FIXTURES

DENSE = ("llama", "gpt2", "qwen2", "qwen3", "llama-biases", "mistral", "gemma2", "gemma3")
MIXTURES = ("mixtral", "qwen3-moe")
PROMPT = 6
"""Tokens of the first row after which the greedy tokens follow."""


def make_source(name: str) -> Source:
    """The fixture of a family, with a tokenizer of bytes (whose higher ids the model does not have)."""
    folder = FIXTURES / name
    model = read_model_config(folder).model_copy(update={"scan_layers": False})
    shapes = ModuleArrays(lambda rngs: Transformer(model, rngs)).abstract_params
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    named = jax.tree_util.tree_flatten_with_path(read_parameters(folder, model, jax.tree.map(lambda _: here, shapes)))
    arrays = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in named[0]}
    return Source(model, arrays, "float32", ByteTokenizer(), (63,), 64)


def expected(name: str) -> dict[str, np.ndarray]:
    """`tokens` [2, 24], the `logits` [2, 24, 64] of transformers, and `greedy`, 12 ids after the first PROMPT."""
    return load_file(Path(FIXTURES) / name / "expected.safetensors")
