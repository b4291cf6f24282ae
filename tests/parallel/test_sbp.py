"""OneFlow's sharding types: the same values in every type, and sums that are made once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxstack.observe.collectives import collectives
from jaxstack.parallel import (
    ParallelConfig,
    broadcast,
    explicit_mesh,
    make_mesh,
    partial,
    redistribute,
    sbp_einsum,
    sbp_of,
    sbp_sharding,
    split,
)
from tests.compilation import run_jitted

ROWS = 8
INNER = 16
COLUMNS = 24


def mesh_of(**degrees: int) -> Mesh:
    parallel = ParallelConfig(**degrees)
    return explicit_mesh(make_mesh(parallel, jax.devices()[: np.prod(list(degrees.values()))]))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return mesh_of(data=2, tensor=4)


def operands() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, INNER)).astype("f4"), random.normal(size=(INNER, COLUMNS)).astype("f4")


def sums_of(compiled: jax.stages.Compiled, mesh: Mesh) -> list[tuple[int, tuple[str, ...]]]:
    """(executions, mesh axes) of each all-reduce."""
    rows = collectives(compiled.as_text() or "", dict(mesh.shape))
    return [(row.calls, row.axes) for row in rows if row.kind == "all-reduce"]


@pytest.mark.quick
def test_a_product_over_a_split_dim_is_partial_and_summed_once(mesh):
    """Two products are added before their sum over the devices is made: one all-reduce, not two."""
    x, w = operands()
    parts = redistribute(x, {"data": split(0), "tensor": split(1)}, mesh), redistribute(w, {"tensor": split(0)}, mesh)

    def added(x: jax.Array, w: jax.Array) -> jax.Array:
        first = sbp_einsum("ij,jk->ik", x, w)
        second = sbp_einsum("ij,jk->ik", x, 2 * w)
        assert sbp_of(first)["tensor"] == sbp_of(first + second)["tensor"] == partial
        assert sbp_of(first)["data"] == split(0)
        return redistribute(first + second, {"data": split(0)})

    compiled = jax.jit(added).lower(*parts).compile()
    assert sums_of(compiled, mesh) == [(1, ("tensor",))]
    np.testing.assert_allclose(compiled(*parts), 3 * x @ w, rtol=1e-4, atol=1e-4)


def test_types_are_those_of_the_array(mesh):
    for types in (
        {},
        {"data": split(0)},
        {"data": split(1), "tensor": split(0)},
        {"data": partial, "tensor": split(1)},
    ):
        found = sbp_of(redistribute(jnp.ones((ROWS, INNER)), types, mesh))
        assert found == {**dict.fromkeys(mesh.axis_names, broadcast), **types}
    both = sbp_sharding(mesh, {"tensor": split(-1), "data": split(1)}, 2)
    assert both.shard_shape((ROWS, INNER)) == (ROWS, INNER // 8)


@pytest.mark.parametrize("before, after", itertools.product([split(0), split(1), broadcast, partial], repeat=2))
def test_every_change_of_type_keeps_the_values(mesh, before, after):
    x, _ = operands()
    placed = redistribute(x, {"tensor": before}, mesh)
    assert sbp_of(placed)["tensor"] == before

    def change(x: jax.Array) -> jax.Array:
        y = redistribute(x, {"tensor": after})
        assert sbp_of(y)["tensor"] == after
        return redistribute(y, {})

    np.testing.assert_allclose(run_jitted(change, placed), x, rtol=1e-6)


@pytest.mark.parametrize(
    ("subscripts", "left", "right", "result"),
    [
        ("ij,jk->ik", split(0), broadcast, split(0)),
        ("ij,jk->ik", broadcast, split(1), split(1)),
        ("ij,jk->ik", split(1), split(0), partial),
        ("ij,jk->ik", broadcast, broadcast, broadcast),
        ("ij,jk->ki", split(0), broadcast, split(1)),
        ("ij,jk->", split(1), split(0), partial),
    ],
)
def test_types_of_a_product_are_those_of_the_paper(mesh, subscripts, left, right, result):
    """Table 1 of Yuan et al. 2021."""
    x, w = operands()
    placed = redistribute(x, {"tensor": left}, mesh), redistribute(w, {"tensor": right}, mesh)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        y = sbp_einsum(subscripts, x, w)
        assert sbp_of(y)["tensor"] == result
        return redistribute(y, {})

    np.testing.assert_allclose(run_jitted(product, *placed), np.einsum(subscripts, x, w), rtol=1e-4, atol=1e-4)


def test_gradients_of_microbatches_are_summed_over_the_devices_once(mesh):
    """The sum over four microbatches stays partial along `data` until after the loop."""
    x = np.random.default_rng(1).normal(size=(4, ROWS, INNER)).astype("f4")
    rows = redistribute(x, {"data": split(1)}, mesh)

    def gram(x: jax.Array) -> jax.Array:
        start = redistribute(jnp.zeros((INNER, INNER)), {"data": partial})
        total, _ = jax.lax.scan(lambda total, piece: (total + sbp_einsum("ij,ik->jk", piece, piece), None), start, x)
        return redistribute(total, {})

    with jax.set_mesh(mesh):
        compiled = jax.jit(gram).lower(rows).compile()
    assert sums_of(compiled, mesh) == [(1, ("data",))]
    np.testing.assert_allclose(compiled(rows), np.einsum("bij,bik->jk", x, x), rtol=1e-4, atol=1e-4)


def test_types_that_do_not_fit_are_refused_with_a_way_out(mesh):
    x = redistribute(jnp.ones((ROWS, INNER)), {"tensor": split(1)}, mesh)
    whole = redistribute(jnp.ones((INNER, COLUMNS)), {}, mesh)
    with pytest.raises(ValueError, match=r"operand 1 is broadcast along it; redistribute it to split\(0\)"):
        sbp_einsum("ij,jk->ik", x, whole)
    with pytest.raises(ValueError, match="splits different letters"):
        sbp_einsum("ij,jk->ik", x, redistribute(whole, {"tensor": split(1)}))
    with pytest.raises(ValueError, match="operand 0 is partial along 'tensor'; sum it"):
        sbp_einsum("ij,jk->ik", redistribute(x, {"tensor": partial}), whole)
    with pytest.raises(ValueError, match="as in 'ij,jk->ik'"):
        sbp_einsum("ij,jk", x, whole)
    with pytest.raises(ValueError, match="unknown mesh axes"):
        redistribute(x, {"rows": split(0)})
    with pytest.raises(ValueError, match="has rank 2"):
        redistribute(x, {"data": split(2)})
    with pytest.raises(ValueError, match="on no mesh of explicit axes"):
        redistribute(jnp.ones(3), {})
    with pytest.raises(ValueError, match="before it enters a traced function"):
        jax.jit(lambda x: redistribute(x, {}, mesh))(jnp.ones(3))
    automatic = make_mesh(ParallelConfig(data=-1))
    assert automatic.axis_types[0] == AxisType.Auto
    with pytest.raises(ValueError, match="use explicit_mesh"):
        redistribute(jnp.ones((ROWS, INNER)), {"data": split(0)}, automatic)
