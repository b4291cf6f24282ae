"""Marks that say what makes a test slow, found by inspecting the code that the test and its fixtures call.

A test with such a mark also gets `slow`, which the default command leaves out. A test module keeps in the default its
tests without a mark, those marked `quick`, or, where it has neither, its first that is neither exhaustive nor marked
`longer`.
"""

import collections
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

SLOW_MARKS = {
    "compiles_for_gpu": "compiles for absent GPUs with XLA's optimisations on",
    "processes": "starts other processes, most of which import jax",
    "interpreted_kernel": "runs a GPU kernel in an interpreter on the CPU",
    "eight_devices": "compiles a program for a mesh of simulated devices",
    "trains": "compiles a model or its training step",
    "longer": "takes a second or more, and another test of the default runs the same code; set by hand",
    "exhaustive": "repeats at more cases, or at full length, what a faster test shows; set by hand",
}
"""Mark -> what makes the test slow."""

_CALLS = {
    "compiles_for_gpu": (
        "tests.hopper.",
        "tests.hopper_steps.",
        "jaxstack.plan.rehearsal.rehearse",
        "jaxstack.plan.rehearsal.can_compile",
        "jaxstack.plan.rehearsal.gpu_topology",
        "jaxstack.plan.rehearsal.device_memory",
    ),
    "processes": ("subprocess.", "multiprocessing.", "benchmarks.serving.browser."),
    "interpreted_kernel": ("tests.pallas_kernels.triton_interpreter.run_interpreted",),
    "eight_devices": (
        "jaxstack.parallel.mesh.make_mesh",
        "jax._src.sharding_impls.make_mesh",
        "jax._src.shard_map.shard_map",
    ),
    "trains": (
        "jaxstack.trainer.Trainer",
        "jaxstack.models.transformer.Transformer",
        "jaxstack.run.",
        "tests.small_runs.make_trainer",
    ),
}
"""Mark -> beginnings of the full names of functions and classes; a test that calls one of them gets the mark."""

_MODULES = {"interpreted_kernel": ("test_mosaic",)}
"""Mark -> names of the test modules whose tests all get it."""

KERNEL_CASES = 2
"""Cases of each parametrized test of kernels that are not `exhaustive`. The default runs the first, the slow tests the
others."""

SLOW_CASES = 1
"""Cases of each parametrized slow test that run with the slow tests; further ones get the mark `exhaustive`."""

SHOWN_ELSEWHERE = {
    "reliability/test_network": "distributed/test_cluster reads addresses, launch/test_supervisor starts processes",
    "parallel/test_expert_collectives": "parallel/test_expert_layouts trains with experts on several devices",
    "parallel/test_step_collectives": "parallel/test_layouts trains with the collectives that it counts",
    "parallel/test_optimizer_layouts": "optim/test_sharded_state shards the state of every optimizer",
    "models/test_passes": "models/test_transformer runs the layers whose passes it counts",
    "run/test_init_from": "models/test_adapters trains with adapters, docs/finetuning.md starts from a checkpoint",
    "parallel/test_overlap": "pallas_kernels/collective_matmul tests the matmuls that overlap communication",
    "models/test_restack": "models/test_chunks and run/test_load read parameters in another stacking",
    "compress/after_training/test_command": "compress/after_training/test_run compresses a model",
    "compress/after_training/test_reload": "compress/after_training/test_run evaluates and generates from it",
    "models/attention/test_training": "models/attention/test_methods runs every kind in a decoder",
    "parallel/pipeline/test_training": "test_combinations trains in stages, parallel/test_layouts compares loss curves",
    "stored/test_logits": "run/test_evaluate compares the loss of a checkpoint with that of its logits",
    "stored/test_extend": "compress/test_extend stores a model in a new format",
    "decoding/test_decode": "serve/test_engine compares greedy answers with the argmax of the full forward",
    "serve/test_chat_page": "serve/test_http asks the server as the page does",
    "reinforce/test_processes": "run/test_processes works in two processes, reinforce/test_command trains on rewards",
    "checkpoint/test_kill": "checkpoint/test_damage reads what a cut-off save leaves",
}
"""Modules without a test in the default, and where it shows the same. Their first test runs with the slow
tests; the others are `exhaustive`."""


def longer(*cases: Any) -> list[Any]:
    """Return values for `pytest.mark.parametrize` that the default command leaves out."""
    return [pytest.param(case, marks=pytest.mark.longer) for case in cases]


def mark_slow_tests(items: Sequence[pytest.Item]) -> None:
    """Add to each test the marks of what makes it slow, and `slow` to those that the default leaves out."""
    modules: dict[str, list[pytest.Item]] = {}
    cases = collections.Counter[str]()
    marks: dict[str, set[str]] = {}
    for item in items:
        test = item.nodeid.split("[")[0]
        cases[test] += item.get_closest_marker("exhaustive") is None
        modules.setdefault(item.nodeid.split("::")[0], []).append(item)
        if test not in marks:
            marks[test] = _marks(item)
        for mark in marks[test]:
            item.add_marker(mark)
        slow = _has_slow_mark(item) and not item.get_closest_marker("quick")
        kernel = test.startswith("tests/pallas_kernels/")
        if kernel and cases[test] > 1:
            item.add_marker("longer")
        if (slow and cases[test] > SLOW_CASES) or (kernel and cases[test] > KERNEL_CASES):
            item.add_marker("exhaustive")
    for name, tests in modules.items():
        left_out = [item for item in tests if not item.get_closest_marker("quick") and _has_slow_mark(item)]
        if len(left_out) == len(tests):
            representative = next((item for item in tests if _may_represent(item)), None)
            left_out = [item for item in tests if item is not representative]
        shown = name.removeprefix("tests/").removesuffix(".py") in SHOWN_ELSEWHERE
        for place, item in enumerate(left_out):
            item.add_marker("slow")
            if shown and place:
                item.add_marker("exhaustive")


def _may_represent(item: pytest.Item) -> bool:
    """Return True if the test may stand for a module of slow tests in the default.

    Exhaustive tests only repeat what another module shows, `longer` ones take seconds. Those that compile for GPUs need
    jax's CUDA plugin, which a plain installation lacks, and modules of `SHOWN_ELSEWHERE` test what faster modules test
    too.
    """
    module = item.nodeid.split("::")[0].removeprefix("tests/").removesuffix(".py")
    costly = any(item.get_closest_marker(mark) for mark in ("exhaustive", "longer", "compiles_for_gpu"))
    return not costly and module not in SHOWN_ELSEWHERE


def _has_slow_mark(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(mark) for mark in SLOW_MARKS)


def _marks(item: pytest.Item) -> set[str]:
    """Return the marks of a test, from everything that the test and its fixtures call within `tests`."""
    if not isinstance(item, pytest.Function):
        return set()
    called = set(_calls(_inner(item.obj)))
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        called |= _calls(_inner(definitions[-1].func))
    marks = {mark for mark, prefixes in _CALLS.items() if any(name.startswith(prefixes) for name in called)}
    return marks | {mark for mark, names in _MODULES.items() if item.module.__name__.split(".")[-1] in names}


def _inner(function: Callable[..., Any]) -> Any:
    """Return the function that decorators, and Hypothesis, wrap."""
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    return inspect.unwrap(getattr(function, "__func__", function))


@functools.cache
def _calls(function: Any) -> frozenset[str]:
    """Return the full names that a function of the tests refers to, itself or through others of the tests."""
    found: set[str] = set()
    _add_calls(function, found, set())
    return frozenset(found)


def _add_calls(function: Any, found: set[str], seen: set[int]) -> None:
    if id(function) in seen or not hasattr(function, "__code__"):
        return
    seen.add(id(function))
    for value in _referred(function):
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        found.add(name)
        if name.startswith("tests."):
            for inner in vars(value).values() if inspect.isclass(value) else (value,):
                _add_calls(_inner(inner), found, seen)


def _referred(function: types.FunctionType) -> Iterator[Any]:
    """Yield the objects behind the names in a function's code: globals, closures, and attributes of modules."""
    names = set(_names(function.__code__))
    values = [function.__globals__[n] for n in names if n in function.__globals__]
    values.extend(cell.cell_contents for cell in function.__closure__ or ())
    opened: set[str] = set()
    while values:
        value = values.pop()
        if isinstance(value, functools.partial):
            values.append(value.func)
        elif inspect.ismodule(value):
            if value.__name__ not in opened:  # Packages refer to each other.
                opened.add(value.__name__)
                values.extend(vars(value)[n] for n in names if n in vars(value))
        else:
            yield value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)
