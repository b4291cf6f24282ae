"""Export of a model to a folder with a web page, whose JavaScript runs it in the browser by WebAssembly or WebGPU."""

import json
import shutil
from pathlib import Path

import numpy as np

from jaxstack.errors import ConfigError
from jaxstack.export.page_tokenizer import describe_tokenizer
from jaxstack.export.source import Source, dense_softmax_problem, write_parameters
from jaxstack.files import write_file
from jaxstack.models.norm import NORMS, RMSNorm
from jaxstack.models.rope import rope_frequencies

PAGE = Path(__file__).parent / "page"
"""The page and its scripts, which are the same for every model."""
_MOST_BYTES = 3_500_000_000
"""Largest size of the weights: WebAssembly addresses 4 GB, which also hold the cache."""


def problem(source: Source) -> str | None:
    """Return the first feature of the model or tokenizer that the web page does not support, as text; None if none."""
    if found := dense_softmax_problem(source.model):
        return found
    size = sum(array.nbytes for array in source.parameters.values())
    if size > _MOST_BYTES:
        return f"its weights take {size / 1e9:.1f} GB, and a page can address 4 GB"
    try:
        describe_tokenizer(source.tokenizer)
    except ConfigError as error:
        return str(error)
    return None


def write(source: Source, folder: Path) -> str:
    """Write the web page with the model's weights, configuration and tokenizer into a folder."""
    shutil.copytree(PAGE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    write_parameters(source, folder)
    _write_json(folder / "model.json", describe_model(source))
    _write_json(folder / "tokenizer_page.json", describe_tokenizer(source.tokenizer))
    return "python -m http.server --directory {folder}, and open http://127.0.0.1:8000 (or export with --serve)"


def describe_model(source: Source) -> dict[str, object]:
    """Describe the model's configuration as plain JSON for the web page's JavaScript."""
    model = source.model
    rope = model.positions == "rope"
    local = model.rope_local_base_freq if rope else None
    width = model.width_per_head
    norm = NORMS[model.norm]
    frequencies = rope_frequencies(width, model.rope_theta, model.rope_scaling) if rope else None
    return {
        "hidden": model.hidden_size,
        "layers": model.num_layers,
        "heads": model.num_heads,
        "kvHeads": model.kv_heads,
        "width": width,
        "feedForward": model.feed_forward_size,
        "gated": model.mlp == "gated",
        "activation": model.hidden_act,
        "vocabulary": model.vocab_size,
        "tied": model.tie_word_embeddings,
        "embeddingScale": model.hidden_size**0.5 if model.scale_embeddings else 1,
        "normEps": model.norm_eps,
        "normOffset": norm.offset if issubclass(norm, RMSNorm) else 0,
        "windows": model.windows(),
        "frequencies": _numbers(frequencies),
        "localFrequencies": _numbers(rope_frequencies(width, local)) if local else None,
        "scale": model.attention_scale,
        "softCap": model.attn_logit_softcapping,
        "finalCap": model.final_logit_softcapping,
        "generation": source.generation(),
    }


def _numbers(array: np.ndarray | None) -> list[float] | None:
    return None if array is None else array.tolist()


def _write_json(path: Path, value: object) -> None:
    write_file(path, json.dumps(value, separators=(",", ":")).encode())
