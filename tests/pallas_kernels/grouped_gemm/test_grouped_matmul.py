"""The grouped matmul: every backend against the loop over groups, its cost, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NotSupported, PackedWeight, grouped_matmul, grouped_matmul_alignment, record_choices
from pallas_kernels.grouped_gemm.groups import aligned_rows, realign
from pallas_kernels.weight_only.formats import Float8Format
from tests.compilation import fully_optimized
from tests.marks import longer
from tests.pallas_kernels.grouped_gemm.cases import Case, check, run

CASES = {
    "uneven": Case((5, 1, 30, 12)),
    "empty_groups": Case((0, 17, 0, 0, 9, 0)),
    "one_group": Case((40,)),
    "all_empty": Case((0, 0, 0), spare=20),
    "rows_of_no_group": Case((3, 9), spare=30),
    "aligned": Case((5, 0, 16, 1), alignment=8),
    "aligned_oddly": Case((5, 0, 16, 1), alignment=3),
    "float32": Case((5, 1, 30, 12), dtype="float32"),
    "float16_many": Case(tuple(range(11)), depth=8, columns=8, dtype="float16"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ["xla", *longer("reference")])
def test_error_at_most_twice_the_plain_version(name, implementation):
    check(CASES[name], implementation)


@pytest.mark.longer
def test_rows_of_no_group_are_zero():
    for case in (CASES["rows_of_no_group"], CASES["aligned"]):
        x, weights, _ = case.arrays()
        noise = np.where(np.arange(case.rows)[:, None] < sum(case.sizes), x, 7.0) if case.alignment == 1 else x
        out = grouped_matmul(
            jnp.asarray(noise, "f4"), jnp.asarray(weights, "f4"), jnp.asarray(case.sizes), alignment=case.alignment
        )
        mine = np.zeros(case.rows, bool)
        for start, size in zip(case.starts, case.sizes, strict=True):
            mine[start : start + size] = True
        assert not np.any(np.asarray(out)[~mine]) and np.all(np.any(np.asarray(out)[mine], axis=1))


@pytest.mark.longer
def test_packed_matrices_are_multiplied_as_their_values():
    """And x has its gradient; the packed matrices are constants."""
    q = jax.random.normal(jax.random.key(1), (3, 5, 4)).astype(jnp.float8_e4m3fn)
    scales = jax.random.uniform(jax.random.key(2), (3, 2, 1))
    weights = PackedWeight({"q": q, "scales": scales}, Float8Format(4, 4), (4,), (5,), (3,))
    x = jax.random.normal(jax.random.key(0), (32, 4))
    sizes = jnp.asarray([1, 0, 20])

    @jax.jit
    def product_and_gradient(weights):
        y, pullback = jax.vjp(lambda x: grouped_matmul(x, weights, sizes), x)
        return y, pullback(y)[0]

    for found, wanted in zip(product_and_gradient(weights), product_and_gradient(weights.dense()), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"weights \[4, 5\]"):
        grouped_matmul(x, weights.take(0), sizes)


def test_sizes_are_data():
    """One compiled program serves all sizes."""
    x = jax.random.normal(jax.random.key(0), (32, 4))
    weights = jax.random.normal(jax.random.key(1), (3, 4, 5))
    compiled = jax.jit(grouped_matmul)
    for sizes in ([32, 0, 0], [1, 2, 29], [10, 10, 12]):
        owner = np.repeat(np.arange(3), sizes)
        wanted = np.einsum("rd,rdf->rf", x, weights[owner])
        np.testing.assert_allclose(compiled(x, weights, jnp.asarray(sizes)), wanted, rtol=1e-5, atol=1e-5)
    assert compiled._cache_size() == 1


@pytest.mark.longer
@fully_optimized()
def test_work_and_memory_do_not_grow_with_the_number_of_groups():
    def cost(groups: int) -> tuple[float, float]:
        x = jnp.zeros((4096, 64))
        weights = jnp.zeros((groups, 64, 64))

        def loss(x, weights):
            return grouped_matmul(x, weights, jnp.full(groups, 4096 // groups), alignment=64).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, weights).compile()
        trips = aligned_rows(4096, groups, 64) // 64  # XLA counts the body of a loop once
        return trips, compiled.memory_analysis().temp_size_in_bytes

    (trips, memory), (more_trips, more_memory) = cost(4), cost(16)
    assert more_trips <= 1.3 * trips
    assert more_memory <= 1.5 * memory + 16 * 64 * 64 * 4


@pytest.mark.longer
def test_realign_moves_rows_and_back():
    sizes = jnp.array([3, 0, 5])
    x = jnp.arange(1, 13, dtype=jnp.float32)[:, None]
    rows = aligned_rows(12, 3, 4)
    aligned = realign(x, sizes, 1, 4, rows)
    assert aligned[:, 0].tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, *[0] * (rows - 9)]
    assert realign(aligned, sizes, 4, 1, 12)[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]


@pytest.mark.parametrize("rows", [0, 1, 5, 64, 1000])
@pytest.mark.parametrize("groups", [1, 3, 100])
def test_aligned_rows_suffice_for_any_sizes(rows, groups):
    random = np.random.default_rng(0)
    for alignment in (1, 8, 128):
        for weights in (np.ones(groups), np.eye(groups)[0], random.dirichlet(np.full(groups, 0.1))):
            sizes = random.multinomial(rows, weights / weights.sum())
            needed = sum(-(-int(size) // alignment) * alignment for size in sizes)
            assert needed <= aligned_rows(rows, groups, alignment)


def test_the_default_on_a_cpu_and_its_alignment_needs_no_copy():
    alignment = grouped_matmul_alignment(1024, 8)
    with record_choices() as choices:
        jaxpr = jax.make_jaxpr(lambda x, w, s: grouped_matmul(x, w, s, alignment=alignment))(
            jnp.zeros((1024, 4)), jnp.zeros((8, 4, 4)), jnp.zeros(8, jnp.int32)
        )
    assert choices[0].backend == "xla" and choices[0].refused[0][0] == "mosaic"
    assert "gather" not in str(jaxpr)


@pytest.mark.longer
def test_vmap_over_problems():
    case = Case((5, 1, 30, 12), dtype="float32")
    x, weights, _ = (jnp.asarray(a, jnp.float32) for a in case.arrays())
    sizes = jnp.array([case.sizes, [48, 0, 0, 0]])
    both = jax.vmap(grouped_matmul, in_axes=(None, None, 0))(x, weights, sizes)
    for out, size in zip(both, sizes, strict=True):
        np.testing.assert_allclose(out, grouped_matmul(x, weights, size), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((8, 5))}, "same D"),
        ({"weights": jnp.zeros((3, 4, 4))}, "same G"),
        ({"weights": jnp.zeros((2, 4, 4), jnp.bfloat16)}, "cast one of them"),
        ({"group_sizes": jnp.zeros(2)}, "integers"),
        ({"alignment": 3}, "divide the rows of x \\(8\\), got 3"),
        ({"implementation": "mosaik"}, "did you mean 'mosaic'"),
    ],
)
def test_refusals(change, message):
    call = {"x": jnp.zeros((8, 4)), "weights": jnp.zeros((2, 4, 4)), "group_sizes": jnp.zeros(2, jnp.int32), **change}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**call)


def test_a_named_backend_never_falls_back():
    with pytest.raises(NotSupported, match="Hopper|jax 0.11"):
        run(CASES["uneven"], "mosaic")
