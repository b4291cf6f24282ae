"""The table of export formats. To add a format, write its module and add a row here."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxstack.export import onnx_target, stablehlo, web
from jaxstack.export.source import Source


class Target(NamedTuple):
    """An export format: its dtypes, the function that writes it, and checks of the model and installed packages."""

    summary: str
    """Short description, for the help text."""
    dtypes: tuple[str, ...]
    """Dtypes of the matrices that it can have, the default first."""
    problem: Callable[[Source], str | None]
    """Returns the feature of a model that the format cannot hold, or None."""
    missing: Callable[[], str | None]
    """Returns the message about a package that is not installed, or None."""
    write: Callable[[Source, Path], str]
    """Writes into a folder, which exists; returns how to run what it wrote, with {folder} for the folder."""


TARGETS = {
    "stablehlo": Target(
        "programs for jax, or another compiler of StableHLO, on CPUs and NVIDIA GPUs",
        ("float32", "bfloat16"),
        stablehlo.problem,
        lambda: None,
        stablehlo.write,
    ),
    "onnx": Target(
        "a graph with a KV cache for ONNX Runtime and other programs",
        ("float32",),
        onnx_target.problem,
        onnx_target.missing,
        onnx_target.write,
    ),
    "web": Target(
        "a page that runs the model in a browser",
        ("float32",),
        web.problem,
        lambda: None,
        web.write,
    ),
}
"""Targets by the name that `--to` has for them."""
