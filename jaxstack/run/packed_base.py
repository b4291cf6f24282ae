"""Weights that stay packed beside a run's adapters: how its trainer gets them, and how its directory keeps them."""

from collections.abc import Callable, Mapping
from pathlib import Path

from jaxstack.checkpoint import compressed
from jaxstack.checkpoint.directory import link_files
from jaxstack.errors import cannot_write
from jaxstack.module_arrays.packed_base import NAME, PackedBase, packed_arrays
from jaxstack.stored.run_directory import PACKED_BASE
from jaxstack.trainer import Trainer
from pallas_kernels import PackedWeight


def packed_view(weights: Mapping[str, PackedWeight]) -> PackedBase | None:
    """Return the view of weights that stay packed; None without any."""
    return PackedBase(weights) if weights else None


def load_packed_base(directory: Path, trainer: Trainer, say: Callable[[str], None]) -> None:
    """Read the weights that stay packed into a trainer whose module has `PackedBase`."""
    view = trainer.module.view(PackedBase)
    assert view is not None
    say(f"{len(view.paths)} weights of {directory} stay packed")
    found = compressed.read_compressed(directory, wanted=view.paths.__contains__)[0]
    trainer.load_companion(NAME, packed_arrays(compressed.named_leaves(found)))


def keep_packed_base(directory: Path, run: Path) -> None:
    """Put the files of a base into a run's directory, by hard links where possible, so that it outlives the base's.

    Raises:
      JaxstackError: they cannot be written.
    """
    target = run / PACKED_BASE / compressed.FOLDER
    if not compressed.is_compressed(run / PACKED_BASE):
        try:
            link_files(directory / compressed.FOLDER, target)
        except OSError as error:
            raise cannot_write(str(target), error) from None
