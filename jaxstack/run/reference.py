"""Log-probabilities of a run's preferences under its reference, computed once and kept in the data's cache.

A file of the cache has the values of one source and split. Its name is a hash of everything that they depend on: the
tokens of the rows, the reference's weights and configuration, and how it was computed.
"""

import contextlib
import functools
import hashlib
import io
import json
from collections.abc import Callable, Generator, Iterator
from typing import cast

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxstack
from jaxstack.data.batch_source import HostBatch
from jaxstack.data.loader import Data
from jaxstack.data.prepared_folders import cache_folder
from jaxstack.data.token_rows import PairRows
from jaxstack.distill import check_vocabulary
from jaxstack.files import write_file, writing_to
from jaxstack.loss import LossSum
from jaxstack.optim.optimizers.sgd import SGD
from jaxstack.parallel import make_mesh
from jaxstack.preference import reference_sums
from jaxstack.run.build_model import build_model
from jaxstack.run.load import start_parameters
from jaxstack.run.setting import Setting
from jaxstack.run_config import RunConfig
from jaxstack.stored import StoredModel
from jaxstack.stored.run_directory import TrainingRun
from jaxstack.trainer import Trainer

_VERSION = 1


def add_references(config: RunConfig, data: Data, report: Callable[[str], None]) -> None:
    """Give the rows of a run's preferences the log-probabilities of their answers, if `cache_reference` is set.

    Args:
      config: configuration of the run, with its layout and vocabulary.
      data: the run's data, whose rows get them.
      report: called with a line when something takes time.

    Raises:
      ConfigError: the reference's directory holds no model, or one with another vocabulary.
    """
    preference = config.preference
    if preference.loss is None or not preference.cache_reference:
        return
    directory = config.run.init_from if preference.reference == "init_from" else preference.reference
    assert directory is not None  # `train` checks it
    stored = StoredModel.open(directory, report)
    check_vocabulary(config.model, stored.model, directory, "preference.reference")
    folder = cache_folder(config.data.cache_dir) / "references"
    common = _identity(config, stored)
    places = {}
    for rows in data.pair_rows:
        key = json.dumps([common, rows.identity], sort_keys=True)
        places[folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"] = rows
    missing = [place for place in places if not place.is_file()]
    if _anywhere(bool(missing)):
        report(f"computing the reference's log-probabilities of {sum(rows.count for rows in places.values()):,} pairs")
        compute = _Reference(config, stored, report)
        for place, rows in places.items():  # every process computes all, as the files of others may be elsewhere
            content = io.BytesIO()
            np.save(content, compute(rows))
            with writing_to(folder):
                folder.mkdir(exist_ok=True)
                write_file(place, content.getvalue())
    for place, rows in places.items():
        rows.references = np.load(place)


def _anywhere(condition: bool) -> bool:
    """Return True if a condition holds on any process."""
    if jax.process_count() == 1:
        return condition
    return bool(multihost_utils.process_allgather(np.asarray(condition)).any())


def _identity(config: RunConfig, stored: StoredModel) -> list[object]:
    """Return what the values of any row depend on, as plain JSON."""
    folder = stored.directory
    if isinstance(stored, TrainingRun):
        folder = stored.checkpoints.directory / str(stored.choose_step(None))
    files = [(str(path.relative_to(folder)), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    device = jax.devices()[0]
    return [
        [_VERSION, jaxstack.__version__, jax.__version__, device.platform, device.device_kind],
        [str(folder.resolve()), [(name, found.st_size, found.st_mtime_ns) for name, found in files]],
        stored.model.model_dump(mode="json"),
        [config.precision.model_dump(mode="json"), config.parallel.model_dump(mode="json"), _batch_size(config)],
        config.preference.method.rows,
    ]


def _batch_size(config: RunConfig) -> int:
    return config.train.global_batch_size // config.train.gradient_accumulation


class _Reference:
    """Computes log-probabilities under a stored model, in the layout and precision of a run.

    Args:
      config: configuration of the run.
      stored: the model.
      report: called with a line that names the model.
    """

    def __init__(self, config: RunConfig, stored: StoredModel, report: Callable[[str], None]):
        setting = Setting(config, make_mesh(config.parallel))
        self._size = _batch_size(config)
        trainer = Trainer(
            build_model(
                config.model_copy(update={"model": stored.model, "adapters": type(config.adapters)()}), setting.dtype
            ),
            functools.partial(reference_sums, pairs=self._size),
            lambda step: {},
            optimizer=SGD(momentum=0.0),
            mesh=setting.mesh,
            layout=setting.layout,
            train=setting.train,
        )
        wanted = trainer.start_shapes[0]
        trainer.start_from(start_parameters(stored.directory, stored.model, wanted, report, verb="measuring rewards"))
        self._state = trainer.state
        self._rules = trainer.steps.rules
        self._placement = trainer.placement
        whole = self._rules.sharding(jax.P())

        def sums(params, non_params, batch) -> jax.Array:
            found = trainer.steps.eval_step(params, non_params, batch).further["sums"]
            return cast(LossSum, found).total

        self._sums = jax.jit(sums, out_shardings=whole)

    def __call__(self, rows: PairRows) -> np.ndarray:
        """Return the values [rows.count, sequences of a pair] float32."""
        found = []
        batches = self._placement.stream(self._batches(rows), self._size, self._size)
        with contextlib.closing(cast(Generator, batches)):
            for batch, _ in batches:
                with jax.set_mesh(self._rules.mesh):
                    found.append(np.asarray(self._sums(self._state.params, self._state.non_params, batch)))
        return np.concatenate(found)[: rows.count]

    def _batches(self, rows: PairRows) -> Iterator[HostBatch]:
        local = self._placement.local_rows(self._size)
        for start in range(0, rows.count, self._size):
            read = [rows.read(min(start + int(row), rows.count - 1)) for row in local]
            batch = {name: np.stack([one[name] for one in read]) for name in ("tokens", "labels")}
            yield {**batch, "index": local.astype(np.int32)}
