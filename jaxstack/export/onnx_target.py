"""Export of a model to ONNX: one graph for both prefill and decoding, which takes past keys and values as inputs.

Inputs and outputs have the names that Hugging Face's Optimum gives them, which other programs expect.
"""

import shutil
from pathlib import Path

from jaxstack.export import run_exported
from jaxstack.export.onnx_graph import onnx_installed
from jaxstack.export.onnx_transformer import build_graph
from jaxstack.export.source import Source, dense_softmax_problem
from jaxstack.files import write_json


def missing() -> str | None:
    """Return an error message if the package onnx, which ONNX export needs, is not installed; else None."""
    return None if onnx_installed() else "the package onnx is missing; install it with pip install 'jaxstack[export]'."


def problem(source: Source) -> str | None:
    """Return the first feature of the model that ONNX export does not support, as text; None if none."""
    return dense_softmax_problem(source.model)


def write(source: Source, folder: Path) -> str:
    """Write an ONNX graph of the model, its tokenizer, and a program that generates text with ONNX Runtime."""
    build_graph(source.model, source.parameters).save(folder / "model.onnx")
    write_json(folder / run_exported.SETTINGS, {"format": "onnx", **source.generation()})
    source.tokenizer.save(folder)
    shutil.copyfile(run_exported.__file__, folder / "run.py")
    return 'python {folder}/run.py --prompt "def " (needs onnxruntime)'
