"""SOAP and Shampoo: blocks, their turns, transcriptions in numpy, closed forms, bytes of state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxstack.optim.base import RunInfo
from jaxstack.optim.block_preconditioning import choose_blocks
from jaxstack.optim.optimizers import Shampoo, Soap
from jaxstack.optim.optimizers.shampoo import inverse_fourth_root
from jaxstack.optim.optimizers.soap import renew_basis
from jaxstack.parallel import ParallelConfig, make_mesh
from jaxstack.parallel.rules import state_spec
from tests.compilation import run_jitted
from tests.small_runs import make_trainer, small_config


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape, inputs, outputs, limit, rows, columns", [
    ((6, 8), 1, 1, 4, (2, 3), (2, 4)),
    ((3, 6, 2, 4), 1, 2, 4, (2, 3), (2, 4)),
    ((3, 2, 4, 6), 2, 1, 8, (1, 8), (1, 6)),
    ((7, 11), 1, 1, 4, (2, 4), (3, 4)),
    ((2730, 8), 1, 1, 1024, (3, 910), (1, 8)),
])  # fmt: skip
def test_blocks_are_equal_and_join_to_what_was_split(shape, inputs, outputs, limit, rows, columns):
    blocks = choose_blocks(shape, inputs, outputs, limit)
    assert (blocks.rows, blocks.columns) == (rows, columns)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    parts, back = run_jitted(lambda x: (blocks.split(x), blocks.join(blocks.split(x))), x)
    assert parts.shape == (*blocks.grid_shape, rows[1], columns[1]) and len(blocks.grid_shape) == len(shape)
    np.testing.assert_array_equal(back, x)


def test_blocks_of_a_large_matrix():
    blocks = choose_blocks((4096, 14336), 1, 1, 1024)
    assert (blocks.rows, blocks.columns, blocks.grid_shape) == ((4, 1024), (14, 1024), (4, 14))


def test_blocks_take_turns():
    blocks = choose_blocks((3, 16, 16), 1, 1, 4)
    flags = np.stack([blocks.needs_refresh("layers/7/up_proj/kernel", jnp.asarray(t), 10) for t in range(20)])
    np.testing.assert_array_equal(flags.sum(0), 2)
    assert flags.sum((1, 2, 3)).max() <= 2 * 3, "16 blocks a layer over 10 steps"
    other = blocks.needs_refresh("layers/0/up_proj/kernel", jnp.asarray(3), 10)
    np.testing.assert_array_equal(flags[3], other, err_msg="layers may be stored together or apart")


def soap_in_numpy(gradients, settings: Soap, due) -> list[np.ndarray]:
    """Vyas et al. 2024, algorithm 3, on one block, with our start of the bases and our ridge."""

    def renew(factor, basis):
        return np.linalg.qr(factor @ basis + 0.1 * np.trace(factor) / len(factor) * basis)[0]

    b = settings.factor_decay
    found = []
    m = np.zeros(gradients[0].shape)
    v = np.zeros(gradients[0].shape)
    left = np.zeros((m.shape[0],) * 2)
    right = np.zeros((m.shape[1],) * 2)
    ql = np.eye(len(left))
    qr = np.eye(len(right))
    for t, g in enumerate(gradients):
        if t:
            m = settings.b1 * m + (1 - settings.b1) * g
            v = settings.b2 * v + (1 - settings.b2) * (ql.T @ g @ qr) ** 2
            step = (ql.T @ m @ qr) / (1 - settings.b1**t) / (np.sqrt(v / (1 - settings.b2**t)) + settings.eps)
            found.append(ql @ step @ qr.T)
        left = b * left + (1 - b) * g @ g.T
        right = b * right + (1 - b) * g.T @ g
        if t == 0:
            for _ in range(5):
                ql = renew(left, ql)
                qr = renew(right, qr)
            found.append(np.zeros_like(g))
        elif due[t]:
            ql = renew(left, ql)
            qr = renew(right, qr)
    return found


@pytest.mark.longer
def test_soap_is_the_papers_algorithm():
    settings = Soap(refresh_every=3)
    path = "up_proj/kernel"
    gradients = [normal(8, 6, seed=t).astype(np.float64) for t in range(9)]
    core = settings.core(RunInfo())
    params = {path: jnp.zeros((8, 6))}
    state = core.init(params)
    due = [bool(choose_blocks((8, 6), 1, 1, 1024).needs_refresh(path, jnp.asarray(t), 3).any()) for t in range(9)]
    for g, wanted in zip(gradients, soap_in_numpy(gradients, settings, due), strict=True):
        found, state = core.update({path: jnp.asarray(g, jnp.float32)}, state, params)
        np.testing.assert_allclose(found[path], wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.longer
def test_soap_on_blocks_of_one_value_is_adam_after_the_first_step():
    """A basis of one vector is 1 or -1."""
    core = Soap(block_size=1).core(RunInfo())
    adam = optax.scale_by_adam(0.95, 0.95)
    params = {"kernel": jnp.zeros((3, 4))}
    state = core.init(params)
    other = adam.init(params)
    found, state = core.update({"kernel": jnp.asarray(normal(3, 4))}, state, params)
    assert not found["kernel"].any()
    for step in range(1, 5):
        gradient = {"kernel": jnp.asarray(normal(3, 4, seed=step))}
        found, state = core.update(gradient, state, params)
        wanted, other = adam.update(gradient, other, params)
        np.testing.assert_allclose(found["kernel"], wanted["kernel"], rtol=1e-4)


def test_bases_converge_to_the_eigenvectors():
    q = np.linalg.qr(normal(12, 12))[0]
    factor = (q * 4.0 ** -np.arange(12)[None]) @ q.T
    basis = jnp.eye(12)
    for _ in range(60):
        basis = renew_basis(jnp.asarray(factor, jnp.float32), basis)
    np.testing.assert_allclose(np.abs(np.asarray(basis[:, :4]).T @ q[:, :4]), np.eye(4), atol=1e-3)
    np.testing.assert_allclose(basis.T @ basis, np.eye(12), atol=1e-5)


@pytest.mark.longer
def test_shampoo_equalises_singular_values_and_has_adams_norm():
    """L^(-1/4) G R^(-1/4) of one gradient is U V^T."""
    settings = Shampoo(root_eps=1e-12)
    core = settings.core(RunInfo())
    adam = optax.scale_by_adam(0.9, 0.95)
    g = {"up_proj/kernel": jnp.asarray(normal(8, 8))}
    found, _ = core.update(g, core.init(g), g)
    wanted, _ = adam.update(g, adam.init(g))
    values = np.linalg.svd(np.asarray(found["up_proj/kernel"]), compute_uv=False)
    np.testing.assert_allclose(values, values[0], rtol=2e-2)
    assert np.linalg.norm(values) == pytest.approx(float(jnp.linalg.norm(wanted["up_proj/kernel"])), rel=1e-4)


def test_inverse_fourth_root():
    q = np.linalg.qr(normal(6, 6))[0]
    factor = jnp.asarray((q * np.array([16.0, 8, 4, 2, 1, 1])) @ q.T, jnp.float32)
    root = np.asarray(inverse_fourth_root(factor, 0.0))
    np.testing.assert_allclose(np.linalg.matrix_power(root, 4) @ factor, np.eye(6), atol=1e-4)
    assert not inverse_fourth_root(jnp.zeros((3, 3)), 1e-5).any()


def test_factors_lie_with_the_blocks_of_their_parameter():
    mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))
    spec = jax.P(None, "fsdp", "tensor")
    shape = (3, 16, 32)
    assert state_spec(mesh, spec, shape, (3, 2, 4, 8, 8)) == jax.P(None, "fsdp", "tensor", None, None)
    assert state_spec(mesh, spec, shape, (3, 1, 4, 16, 16)) == jax.P(None, None, ("tensor", "fsdp"), None, None)
    assert state_spec(mesh, spec, shape, (3, 1, 1, 16, 16)) == jax.P(None, None, None, ("fsdp", "tensor"), None)
    assert state_spec(mesh, spec, shape, (3, 1, 32)) == jax.P(None, None, "tensor")
    assert state_spec(mesh, spec, shape, (3, 16)) == jax.P()


def test_described_bytes_are_those_of_the_arrays():
    trainer = make_trainer(
        small_config(
            "optimizer={name: soap, block_size: 8}", "parallel.fsdp=2", "parallel.tensor=2", "model.num_layers=1"
        )
    )
    described = trainer.describe_sharding()["device_bytes"]["optimizer"]
    held = [x.addressable_shards[0].data for x in jax.tree.leaves(trainer.state.optimizer)]
    assert described == sum(x.size * x.dtype.itemsize for x in held)
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trainer.abstract_state.optimizer))
    assert described < 0.27 * whole, "every factor is split over the four devices"
