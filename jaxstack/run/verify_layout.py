"""Check of a parallel layout at the start of a run: one step of a small model in it, compared with one device.

A layout that sums or splits a gradient wrongly trains to a worse model in silence. So a copy of the run's model, narrow
and with few layers, takes a step on random tokens in the run's layout, with its features, and the same step on one
device. Loss and gradients must agree up to rounding.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxstack
import pallas_kernels
from jaxstack.distributed.coordination import abandon_thread, all_true, broadcast_from_first, is_first
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.files import write_json
from jaxstack.heartbeat import doing
from jaxstack.module_arrays.module import Dict
from jaxstack.observe.environment import installed_versions
from jaxstack.parallel import make_mesh
from jaxstack.parameter_paths import path_name
from jaxstack.resilience.progress_file import ProgressFile
from jaxstack.run.build import make_trainer
from jaxstack.run.setting import Setting
from jaxstack.run.small_copy import VOCABULARY, in_float32, on_one_device, small_copy
from jaxstack.run_config import RunConfig
from jaxstack.state import TrainState
from jaxstack.trainer import Trainer
from pallas_kernels.target import lowering_platform

SECONDS = 20.0
"""Longest time that `auto` waits for the two programs; a run with slower ones begins without the check."""
_TRIES = 3
"""Number of batches of which one must agree. Rounding may move a token to another expert, or a value to another step of
a rounded weight or input, in one batch; a wrong layout is wrong in each."""
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Compute dtype -> largest relative difference of the loss, and of each parameter's gradient by its norm, that counts
as rounding. A gradient without the share of some devices differs by more."""
_FP8_TOLERANCE = 0.3
_REDUCE_TOLERANCE = 0.02
"""Tolerance at least, if gradients are summed in bfloat16, whose sums of two are rounded by up to 2^-9."""
_SMALLEST_GRADIENT = 1e-3
"""Share of the largest gradient norm of a parameter below which a gradient counts as zero up to rounding."""
_WAS_ZERO = 0.02
"""Standard deviation of the numbers that stand for parameters of zeros, that of embeddings."""
_VOLTA = (7, 0)
"""Compute capability of GPUs that run none of our kernels."""
_SECTIONS = {"model", "train", "optimizer", "parallel", "precision", "adapters", "compression"}
"""Sections of the small copy's configuration that its programs depend on."""
_UNTUNED = {"xla_gpu_autotune_level": 0}
"""Options of XLA with which it does not time matmuls on GPUs: that takes seconds, and may choose anew each time."""


T = TypeVar("T")


class _Difference(NamedTuple):
    size: float
    """Largest relative difference; NaN if a result is not finite."""
    of: str


class _LeftOut(Exception):
    """The check cannot be made; the reason is its text."""


def check_layout(config: RunConfig, say: Callable[[str], None], *, resized: bool = False) -> None:
    """Make the check that `resilience.verify_layout` asks for, before a run; all its processes call it.

    With `auto` layouts are checked in which devices hold parts of the model or of a sequence, if it takes at most
    `SECONDS`, and no earlier run on this machine found the same program on the same kind of devices to be right. An
    error of the check itself is then no error of the run.

    Args:
      config: configuration of the run, with its degrees and vocabulary filled in.
      say: called with the result, or why there is none.
      resized: the run goes on with fewer devices than before, in a layout that `auto` takes for checked.

    Raises:
      ConfigError: the value is `true`, and there is no small copy of the model that the layout fits, or its loss says
        nothing.
      JaxstackError: the results differ; the message names the parameter and the mesh axes.
    """
    wanted = config.resilience.verify_layout
    if wanted is True:
        verify_layout(config, say)
    elif wanted == "auto" and not resized and _splits_model(config.one_worker):
        try:
            _verify_once(config, say)
        except _LeftOut as reason:
            say(f"layout check left out: {reason}")


def verify_layout(config: RunConfig, say: Callable[[str], None]) -> None:
    """Compare a step of a small copy of a run's model in the run's layout and precision with the step of one device.

    All processes call it. Distillation, preferences and rewards are left out: the loss is that of a language model.

    Args:
      config: configuration of the run, with its degrees and vocabulary filled in.
      say: called with the result.

    Raises:
      ConfigError: there is no small copy that the layout fits, or its loss says nothing.
      JaxstackError: the results differ; the message names the parameter and the mesh axes.
    """
    if problem := _workers_problem(config):
        raise ConfigError(f"{problem}; set resilience.verify_layout to false.")
    config = config.one_worker
    if _devices(config) > 1:
        small = small_copy(config)
        tolerance = _tolerance(small)
        try:
            compared = _compare(small, tolerance, None)
        except _LeftOut as reason:
            raise ConfigError(
                f"the layout cannot be checked: {reason} Set resilience.verify_layout to false."
            ) from None
        _judge(config, small, compared, tolerance, say)


def _verify_once(config: RunConfig, say: Callable[[str], None]) -> None:
    """Compare in float32, without kernels of ours, unless a record says that it was done.

    Raises:
      _LeftOut: it cannot be done, or not in time.
      JaxstackError: the results differ.
    """
    if problem := _workers_problem(config):
        raise _LeftOut(f"{problem}.")
    config = config.one_worker
    small, record = _agreed(functools.partial(_small_program, config), SECONDS)
    if broadcast_from_first(record is not None and os.path.exists(record)):
        return
    tolerance = _tolerance(small)
    _judge(config, small, _compare(small, tolerance, SECONDS), tolerance, say)
    if record is not None and is_first():
        with contextlib.suppress(OSError):  # the next start checks again
            record.parent.mkdir(parents=True, exist_ok=True)
            write_json(record, small.parallel.model_dump(mode="json"))


def _small_program(config: RunConfig) -> tuple[RunConfig, Path | None]:
    """Return the small copy that `auto` computes with, and the file that records it as right (None: there is none)."""
    small = in_float32(small_copy(config))
    if jax.devices()[0].platform == "gpu":
        small = small.model_copy(update={"train": small.train.model_copy(update={"xla_options": _UNTUNED})})
    return small, _record_of(small)


def _splits_model(config: RunConfig) -> bool:
    """Return True unless each device computes with a whole model of its own, as one device does, and sums gradients."""
    split = {axis for axis, degree in config.parallel.degrees.items() if degree > 1}
    if not split:
        return False
    mesh = make_mesh(config.parallel, jax.devices()[: _devices(config)])
    return split != {"data"} or bool(config.parallel.zero) or Setting(config, mesh).layout.peer_copies


def _workers_problem(config: RunConfig) -> str:
    """Return why the workers cannot be checked; empty if they can."""
    if config.parallel.workers == 1 or jax.process_count() == 1:
        return ""
    return (
        f"it compares one worker's layout, which several processes do not share, and parallel.workers is "
        f"{config.parallel.workers}"
    )


def _devices(config: RunConfig) -> int:
    return math.prod(config.parallel.degrees.values())


def _record_of(small: RunConfig) -> Path | None:
    """Return the file that is there if this program was found right, beside the compiled programs; None without them.

    Its name is a hash of all that the two programs depend on: the small copy, the sources of both packages, versions,
    devices, and options of XLA and NCCL.
    """
    directory = str(jax.config.values.get("jax_compilation_cache_dir") or "")
    if not directory or "://" in directory:
        return None
    device = jax.devices()[0]
    known = {
        "config": small.model_dump(mode="json", by_alias=True, include=_SECTIONS),
        "sources": _hash_of_sources(),
        "versions": installed_versions(),
        "devices": [device.device_kind, device.client.platform_version, jax.device_count(), jax.process_count()],
        "variables": {name: value for name, value in os.environ.items() if name.startswith(("XLA_FLAGS", "NCCL_"))},
    }
    name = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()
    return Path(directory) / "verified_layouts" / f"{name}.json"


@functools.cache
def _hash_of_sources() -> str:
    digest = hashlib.sha256()
    for package in (jaxstack, pallas_kernels):
        folder = Path(str(package.__file__)).parent
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{file.relative_to(folder)}\n".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _tolerance(small: RunConfig) -> float:
    """Return the largest relative difference that counts as rounding."""
    if small.precision.fp8 != "none":
        return _FP8_TOLERANCE
    least = _REDUCE_TOLERANCE if small.precision.reduce == "bfloat16" else 0.0
    return max(least, _TOLERANCES[small.precision.compute_dtype(jax.devices()[0].platform)])


def _compare(small: RunConfig, tolerance: float, seconds: float | None) -> tuple[_Difference, float]:
    """Take the same steps in the layout and on one device, until one of them agrees.

    Args:
      small: configuration of the small copy.
      tolerance: difference that counts as none.
      seconds: time limit for the two programs, which are then of XLA's operations alone; None: there is none.

    Returns:
      The smallest of the differences of the steps, and the seconds that all of it took.
    """
    began = time.monotonic()
    with doing("comparing a small model in the run's layout with one device"), _quick_compilation(seconds):
        single = on_one_device(small)
        pairs = ((single, jax.local_devices()[:1]), (small, jax.devices()[: _devices(small)]))
        reference, many = _in_time([functools.partial(_prepare, *pair, seconds is not None) for pair in pairs], seconds)
        # Parameters are made once: a layout must not decide on the initial values either.
        start = jax.tree.map(_as_numbers, reference.stored_state)
        start = start._replace(params=jax.tree.map(_not_zero, start.params))
        differences = []
        with ProgressFile.of_this_process().during("check", _silence_seconds(small)):
            for step in range(_TRIES):
                compare = functools.partial(_difference_of_step, reference, many, start, step)
                differences.append(_agreed(compare, seconds))
                if all_true(differences[-1].size <= tolerance):  # each process compares with its own first device
                    break
    return min(differences, key=_order), time.monotonic() - began


def _silence_seconds(small: RunConfig) -> float | None:
    """Return after how long without a sign of life a process is stuck in a step of the check, in a run's launcher.

    That of a step of the run, but not less than `SECONDS`: a run's steps may be limited to less than the first
    transfers between devices take.
    """
    seconds = small.resilience.step_seconds
    return None if seconds is None else max(seconds, SECONDS)


def _difference_of_step(reference: Trainer, many: Trainer, start: TrainState, step: int) -> _Difference:
    """Return the difference of a step of two trainers from the same state.

    Raises:
      _LeftOut: the step on one device says nothing.
    """
    for trainer in (reference, many):
        trainer.stored_state = jax.tree.map(_place, start, trainer.abstract_stored_state)
    wanted = _loss_and_gradients(reference, step)
    if not _is_finite(wanted):
        raise _LeftOut("the loss of the small copy is not finite, or has no gradient, on one device either.")
    return _largest_difference(_loss_and_gradients(many, step), wanted)


@contextlib.contextmanager
def _quick_compilation(seconds: float | None) -> Iterator[None]:
    """Context in which XLA optimizes programs for CPUs less, if there is a time limit: most of the time is LLVM's."""
    name = "jax_disable_most_optimizations"
    before = jax.config.values.get(name)
    if seconds is None or before is None or jax.devices()[0].platform != "cpu":
        yield
        return
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _agreed(task: Callable[[], T], seconds: float | None) -> T:
    """Return the result of a task that all processes begin together.

    Raises:
      _LeftOut: there is a time limit, and here or on another process the task failed; or it says so itself.
    """
    result = problem = None
    try:
        result = task()
    except _LeftOut as reason:
        problem = str(reason)
    except Exception as error:
        if seconds is None:
            raise
        problem = _first_line(error)
    if all_true(problem is None):
        return cast(T, result)
    raise _LeftOut(problem or "another process could not make it.")


def _in_time(tasks: list[Callable[[], Trainer]], seconds: float | None) -> list[Trainer]:
    """Return the results of tasks, each of which runs in a thread: XLA compiles without Python's lock.

    Raises:
      _LeftOut: there is a time limit, and here or on another process one of them took longer or failed. It ends by
        itself beside the run; the programs are then in JAX's compilation cache for the next start.
    """
    # Not daemon threads: Python ends these inside of XLA's compiler at the exit of a process, which aborts it.
    threads = concurrent.futures.ThreadPoolExecutor(len(tasks), thread_name_prefix="jaxstack layout check")
    futures = [threads.submit(task) for task in tasks]
    threads.shutdown(wait=False)

    def results() -> list[Trainer]:
        _, late = concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_EXCEPTION)
        for future in futures:
            if future.done():
                future.result()
        if late:
            abandon_thread()  # one of several processes exits without it
            raise _LeftOut(
                f"compiling it takes more than {seconds or 0:.0f} s; resilience.verify_layout=true waits for it."
            )
        return [future.result() for future in futures]

    return _agreed(results, seconds)


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text, with its class unless it is one of ours, which say all in the text."""
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, JaxstackError) else f"{type(error).__name__}: {text}"


def _prepare(config: RunConfig, devices: list[Any], plain: bool) -> Trainer:
    """Return a trainer with a compiled step.

    Args:
      plain: use XLA's operations alone, and multiply in float32 to its full precision.
    """
    with _plain_operations(devices[0].platform) if plain else contextlib.nullcontext():
        trainer = make_trainer(config, _batch_of(config), devices)
        trainer.compile(trainer.peek_batch(), create_state=len(devices) == 1)
        if not trainer.module.stores_plain:  # compiled here, because the time limit holds for it, too
            trainer.from_plain.lower(trainer.abstract_stored_state).compile()
            trainer.to_plain.lower(trainer.abstract_state).compile()
    return trainer


@contextlib.contextmanager
def _plain_operations(platform: str) -> Iterator[None]:
    with jax.default_matmul_precision("highest"), contextlib.ExitStack() as stack:
        if platform == "gpu":
            stack.enter_context(lowering_platform("cuda", _VOLTA))
        yield


def _batch_of(config: RunConfig) -> Callable[[int], Mapping[str, np.ndarray]]:
    """Return a function that makes batches of random tokens, in two documents a row, whose labels count differently."""
    rows = config.train.global_batch_size
    length = config.train.sequence_length

    def make(step: int) -> Mapping[str, np.ndarray]:
        random = np.random.default_rng(step)
        tokens = (config.model.vocab_size or VOCABULARY) * random.random((rows, length + 1)) ** 3
        tokens = tokens.astype(np.int32)
        labels = tokens[:, 1:].copy()
        labels[random.random((rows, length)) < np.linspace(0, 0.9, rows)[:, None]] = -100
        documents = np.broadcast_to(np.arange(length) >= length // 3, (rows, length)).astype(np.int32) + 1
        return {"tokens": tokens[:, :-1], "labels": labels, "segment_ids": documents}

    return make


def _loss_and_gradients(trainer: Trainer, step: int) -> tuple[float, Dict]:
    """Take a step on a batch; return its loss, and by path the momentum of SGD after it, which is the gradient."""
    batches = trainer.batches(step)
    metrics = trainer.train_step(next(batches)[0])
    ProgressFile.of_this_process().note()  # a process that hangs before it has one sign of life less than its peers
    batches.close()
    gradients = _whole(trainer.stored_state.optimizer, trainer)
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return trainer.read(metrics)["loss"], {path_name(path).split("trace/")[-1]: x for path, x in leaves}


def _whole(tree: Any, trainer: Trainer) -> Any:
    """Return arrays, of which each process may have a part, as NumPy arrays."""
    if jax.process_count() > 1 and trainer.rules.mesh.size > 1:
        everywhere = NamedSharding(trainer.rules.mesh, PartitionSpec())
        tree = jax.jit(lambda x: x, out_shardings=everywhere)(tree)
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0) if x.is_fully_replicated else x), tree)


def _as_numbers(x: jax.Array) -> np.ndarray:
    """Return an array of one device as a NumPy array; random keys as their numbers."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def _not_zero(x: np.ndarray) -> np.ndarray:
    """Return a parameter, with random numbers in place of zeros: beside zeros, gradients are zero in any layout.

    The second matrix of an adapter is zero at first, so that the first has no gradient.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.any():
        return x
    return np.random.default_rng(x.size).normal(0, _WAS_ZERO, x.shape).astype(x.dtype)


def _place(x: np.ndarray, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        return jax.jit(jax.random.wrap_key_data, out_shardings=wanted.sharding)(x)
    return jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda index: x[index])


def _is_finite(result: tuple[float, Dict]) -> bool:
    norms = [float(np.linalg.norm(x)) for x in result[1].values()]
    return all(map(math.isfinite, (result[0], *norms))) and max(norms, default=0.0) > 0


def _order(difference: _Difference) -> float:
    return difference.size if math.isfinite(difference.size) else math.inf


def _largest_difference(found: tuple[float, Dict], wanted: tuple[float, Dict]) -> _Difference:
    """Return the largest relative difference, and of what it is."""
    loss = abs(found[0] - wanted[0]) / abs(wanted[0])
    norms = {path: float(np.linalg.norm(x)) for path, x in wanted[1].items()}
    least = _SMALLEST_GRADIENT * max(norms.values())
    differences = {
        path: float(np.linalg.norm(found[1][path] - x)) / max(norms[path], least) for path, x in wanted[1].items()
    }
    worst = max(differences, key=lambda path: (not math.isfinite(differences[path]), differences[path]))
    named = f"gradient of {worst}"
    return _Difference(loss, "loss") if not loss <= differences[worst] else _Difference(differences[worst], named)


def _judge(
    config: RunConfig,
    small: RunConfig,
    compared: tuple[_Difference, float],
    tolerance: float,
    say: Callable[[str], None],
) -> None:
    """Report a result that agrees.

    Raises:
      JaxstackError: it does not.
    """
    difference, seconds = compared
    dtype = small.precision.compute_dtype(jax.devices()[0].platform)
    split = " x ".join(f"{axis} {degree}" for axis, degree in config.parallel.degrees.items() if degree > 1)
    if not all_true(difference.size <= tolerance):
        raise JaxstackError(
            f"the layout {split} computes another {difference.of} than one device, by {difference.size:.2g} of its "
            f"norm (at most {tolerance:g} is rounding in {dtype}). The run would train on wrong gradients: leave out "
            "one axis or feature after the other to find which of them it is, and please report it; "
            "resilience.verify_layout=false trains all the same."
        )
    say(
        f"layout {split}: a small copy of the model has the loss and gradients of one device (in {dtype}, largest "
        f"relative difference {difference.size:.1e}, {difference.of}; checked in {seconds:.1f} s)"
    )
