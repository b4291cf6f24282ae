"""Loads the trained model to export, and contains functions that several export formats share."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxstack.checkpoint.compressed import dense_parameter, named_leaves
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.errors import ConfigError
from jaxstack.export.run_exported import PARAMETERS
from jaxstack.models.config import ModelConfig
from jaxstack.run.load import load
from pallas_kernels import PackedWeight

DTYPES = ("float32", "bfloat16")
_DEFAULT_CONTEXT = 1024


@dataclasses.dataclass(frozen=True)
class Source:
    """The trained model to export, with its tokenizer.

    Attributes:
      model: its configuration, with unrolled layers.
      parameters: arrays by path, such as `decoder/layers/0/attention/q_proj/kernel`; matrices in the compute dtype.
      dtype: name of the compute dtype.
      tokenizer: the tokenizer that it was trained with.
      stop_tokens: ids that end a text.
      context: longest sequence in tokens that the export must allow.
    """

    model: ModelConfig
    parameters: dict[str, np.ndarray]
    dtype: str
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    context: int

    @property
    def vocabulary(self) -> int:
        """Number of token ids that may be generated; the model's embedding may have more rows."""
        return min(self.tokenizer.vocab_size, self.model.vocab_size or 0)

    def generation(self) -> dict[str, object]:
        """Return settings for generating text as plain JSON: vocabulary size, special ids and context length."""
        return {
            "vocabulary": self.vocabulary,
            "document_start": self.tokenizer.document_start,
            "stop_tokens": list(self.stop_tokens),
            "context": self.context,
        }


def load_source(
    directory: str | Path,
    *,
    step: int | None = None,
    dtype: str = "float32",
    context: int | None = None,
    report: Callable[[str], None] = print,
) -> Source:
    """Load a training run or a Hugging Face checkpoint in order to export it.

    Args:
      directory: run directory, or directory of a Hugging Face checkpoint.
      step: step of the checkpoint; default: the newest.
      dtype: dtype of the computation and of the matrices.
      context: longest sequence; default: `max_position_embeddings`, or 1024 (or the training length, if longer).
      report: called with each warning.

    Raises:
      ConfigError: the directory holds no model or no tokenizer, or the model has fewer positions than `context`.
      JaxstackError: there is no checkpoint, or it is damaged.
    """
    run = load(directory, ["parallel.data=1", f"precision.compute={dtype}"], step=step, report=report)
    limit = run.config.model.max_position_embeddings
    if context is not None and limit is not None and context > limit:
        raise ConfigError(f"--context {context} is longer than the model's max_position_embeddings ({limit}).")
    context = context or limit or max(_DEFAULT_CONTEXT, run.config.train.sequence_length)
    if any(isinstance(leaf, PackedWeight) for leaf in named_leaves(run.parameters).values()):
        report(f"note: {directory} holds compressed weights; the export holds their values in {dtype}, uncompressed")
    arrays = {
        path: np.asarray(dense_parameter(path, leaf).astype(dtype if isinstance(leaf, PackedWeight) else leaf.dtype))
        for path, leaf in named_leaves(run.parameters).items()
    }
    model = run.config.model.model_copy(update={"scan_layers": False})
    return Source(model, arrays, dtype, run.tokenizer, tuple(sorted(run.stop_tokens)), context)


def write_parameters(source: Source, folder: Path) -> None:
    """Write the model's parameters to a safetensors file in the export folder."""
    arrays = {path: np.ascontiguousarray(array) for path, array in source.parameters.items()}
    save_file(arrays, folder / PARAMETERS)
    (folder / PARAMETERS).chmod((folder.stat().st_mode & 0o666) | 0o600)


def dense_softmax_problem(model: ModelConfig) -> str | None:
    """Return the first feature of a model that the ONNX and web exports do not support (such as MoE), or None."""
    if others := [mixer.described for mixer in model.mixers() if mixer.title != "softmax"]:
        return f"{others[0]} (only attention.name softmax)"
    if model.moe is not None:
        return "moe, a mixture of experts (only dense layers)"
    if any(layer.mixer is None or layer.feed_forward is None for layer in model.layers()):
        return "layer_types: attention_only, feed_forward_only (only layers of two sublayers)"
    if model.positions == "rope" and any(layer.rotation is None for layer in model.layers()):
        return "layer_types: full_attention_no_rope (all layers rotate queries and keys)"
    given = {
        "pre_norms: false": not model.pre_norms,
        "attention.sinks": getattr(model.attention, "sinks", False),
        "layer_types: chunked_attention": any(layer.chunk for layer in model.layers()),
        f"qk_norm: {model.qk_norm}": model.qk_norm in ("all_heads", "without_gain"),
        "residual_multiplier": model.residual_multiplier != 1,
        "logits_scaling": model.logits_scaling != 1,
        "layer_scalars": model.layer_scalars,
        "hidden_size_per_layer_input": model.hidden_size_per_layer_input,
    }
    return next((name for name, found in given.items() if found), None)
