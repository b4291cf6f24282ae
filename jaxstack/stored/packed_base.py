"""The compressed model whose weights a run with adapters keeps packed: where it is, and its copy in the run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from jaxstack.checkpoint import compressed
from jaxstack.checkpoint.directory import link_files
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.errors import ConfigError, cannot_write
from pallas_kernels import PackedWeight

PACKED_BASE = "base"
"""Folder of a run with the compressed model whose weights stayed packed beside the adapters that the run trains."""


class PackedModel(NamedTuple):
    """A compressed model of which some weights stay packed beside adapters."""

    directory: Path
    weights: Mapping[str, PackedWeight]
    """Path of a weight that stays packed -> its shapes, in `jax.ShapeDtypeStruct`."""


def open_packed_base(directory: Path) -> PackedModel | None:
    """Return the compressed model in a directory, without reading arrays; None if none of its weights stays packed."""
    weights = base_weights(compressed.describe_compressed(directory))
    return PackedModel(directory, weights) if weights else None


def find_packed_base(
    run: Path,
    branch_from: str | None,
    init_from: str | None,
    problem: str | None,
    say: Callable[[str], None],
) -> PackedModel | None:
    """Return the model whose weights a run keeps packed beside its adapters; None if there is none.

    That is the base of a run that goes on, or else the compressed model that a new run starts from.

    Args:
      run: directory of the run.
      branch_from: directory of the run whose checkpoint this one goes on from.
      init_from: the model that a new run starts from.
      problem: reason why this run cannot keep weights packed; None: it can.
      say: called with a note if a packed model is therefore read as plain numbers.

    Raises:
      ConfigError: the run goes on from one that keeps its base packed, which this run cannot.
    """
    for owner in (run, branch_from):
        base = None if owner is None else open_packed_base(Path(owner) / PACKED_BASE)
        if base is None:
            continue
        if problem:
            raise ConfigError(
                f"{owner} trains adapters beside weights that stay packed, which this run cannot: {problem}; "
                "go on with the settings that it began with, or start a new run from its base."
            )
        return base
    base = None if init_from is None else open_packed_base(Path(init_from))
    if base is None or CheckpointManager(run / "checkpoints").all_steps():  # of a run whose base was unpacked
        return None
    if problem:
        say(f"note: the weights of {init_from} are unpacked, as {problem}")
        return None
    return base


def keep_packed_base(base: PackedModel, run: Path) -> None:
    """Put the files of a base into a run's directory, by hard links where possible, so that it outlives the base's.

    Raises:
      JaxstackError: they cannot be written.
    """
    target = run / PACKED_BASE / compressed.FOLDER
    if open_packed_base(run / PACKED_BASE) is None:
        try:
            link_files(base.directory / compressed.FOLDER, target, target.with_name(f".{target.name}-linking"))
        except OSError as error:
            raise cannot_write(str(target), error) from None


def base_weights(weights: Mapping[str, PackedWeight]) -> dict[str, PackedWeight]:
    """Return those of a compressed model's weights that stay packed beside adapters: of dense layers and experts."""
    return {path: x for path, x in weights.items() if path.startswith("decoder/") and path.endswith("/kernel")}
