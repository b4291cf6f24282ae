"""Weights and gradients that travel by copies: the same numbers as by collectives, in layouts of every kind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxstack.errors import ConfigError
from jaxstack.parallel import make_mesh
from jaxstack.parallel.weight_gather import gather, in_one_process, scatter
from jaxstack.run.setting import Setting
from tests.hopper import hopper_topology
from tests.parallel.test_layouts import assert_trains_as_one_device
from tests.small_runs import make_trainer, metrics_of_steps, small_config

AXES = [("a",), ("b",), ("a", "b")]


@functools.cache
def mesh() -> Mesh:
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def on_mesh(function, spec: PartitionSpec, out: PartitionSpec):
    return jax.jit(jax.shard_map(function, mesh=mesh(), in_specs=spec, out_specs=out, check_vma=False))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("axes", AXES, ids="".join)
def test_copies_gather_what_a_collective_gathers(axes, dim):
    x = jax.random.normal(jax.random.key(0), (16, 24))
    spec = PartitionSpec(*[None] * dim, axes)
    copied = on_mesh(lambda x: gather(x, axes, dim, peer_copies=True), spec, PartitionSpec())(x)
    np.testing.assert_array_equal(copied, x)
    np.testing.assert_array_equal(
        on_mesh(lambda x: gather(x, axes, dim, peer_copies=False), spec, PartitionSpec())(x), x
    )


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("axes", AXES, ids="".join)
def test_copies_sum_and_scatter_as_a_collective_does(axes, dim):
    # Of each device its own: one row of blocks a device along both axes.
    x = jax.random.normal(jax.random.key(1), (8, 16, 24))
    spec = PartitionSpec(("a", "b"))
    # Whole over the axes that are not summed over: of each their first.
    out = PartitionSpec(*[None] * dim, axes)
    found, wanted = (
        on_mesh(lambda x, copies=copies: scatter(x[0], axes, dim, "float32", peer_copies=copies), spec, out)(x)
        for copies in (True, False)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_gradients_in_bfloat16_are_summed_in_float32_by_copies():
    x = jax.random.normal(jax.random.key(2), (8, 8, 4)).astype(jnp.bfloat16)
    spec = PartitionSpec(("a", "b"))

    def sums(x):
        return scatter(x[0], ("a", "b"), 0, "float32", peer_copies=True)

    program = on_mesh(sums, spec, spec)
    np.testing.assert_allclose(program(x), np.asarray(x, np.float32).sum(0), rtol=1e-6)
    jaxpr = str(jax.make_jaxpr(program)(x))
    assert "bf16[1,4] = ppermute" in jaxpr and "f32[1,4] = ppermute" not in jaxpr


LAYOUTS = [
    ("parallel.fsdp=4",),
    ("parallel.data=4", "parallel.zero=2"),
    ("parallel.context=4",),
    pytest.param(("parallel.fsdp=2", "parallel.context=2", "parallel.tensor=2"), marks=pytest.mark.exhaustive),
    pytest.param(("parallel.data=2", "parallel.zero=1", "parallel.fsdp=2"), marks=pytest.mark.exhaustive),
    pytest.param(("parallel.fsdp=2", "parallel.data=2", "train.gradient_accumulation=2"), marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("overrides", LAYOUTS, ids=" ".join)
def test_a_layout_by_copies_trains_as_one_device(overrides):
    assert_trains_as_one_device(*overrides, "parallel.copy_engines=always")


@pytest.mark.exhaustive
def test_unrolled_layers_by_copies_train_as_one_device():
    shape = ("model.scan_layers=false", "model.remat=full")
    assert_trains_as_one_device("parallel.fsdp=2", "parallel.copy_engines=always", shape=shape)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["current", pytest.param("blockwise", marks=pytest.mark.exhaustive)])
def test_weights_in_fp8_travel_by_copies(recipe):
    shape = ("parallel.fsdp=2", f"precision.fp8={recipe}", "precision.fp8_rules=[{path: _proj, fp8: true}]")
    found, wanted = (
        [m["loss"] for m in metrics_of_steps(make_trainer(small_config(*shape, f"parallel.copy_engines={way}")), 3)]
        for way in ("always", "never")
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_where_weights_travel_by_copies():
    cpu = jax.devices()
    gpus = hopper_topology(4).devices

    def copies(devices, *overrides: str) -> bool:
        config = small_config("parallel.fsdp=4", "model.scan_layers=false", *overrides)
        return Setting(config, make_mesh(config.parallel, devices)).layout.peer_copies

    assert copies(gpus)
    assert not copies(gpus, "model.scan_layers=true")
    assert not copies(gpus, "parallel.copy_engines=never")
    assert copies(gpus, "parallel.fsdp=2", "parallel.context=2")
    assert not copies(gpus, "parallel.fsdp=2", "parallel.tensor=2")
    assert not copies(cpu[:4]) and copies(cpu[:4], "parallel.copy_engines=always")
    assert not in_one_process(Mesh(np.array(gpus[:1]), ("data",)))


def test_stages_refuse_copies():
    with pytest.raises(ConfigError, match=r"copy_engines=always .* needs parallel\.pipeline=1 \(2\)"):
        small_config("parallel.pipeline=2", "parallel.copy_engines=always", "train.gradient_accumulation=2")
