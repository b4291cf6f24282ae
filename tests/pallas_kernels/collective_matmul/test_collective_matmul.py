"""Both operations on simulated devices: values and gradients are those of plain matmuls on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import NotSupported, all_gather_matmul, lowering_platform, matmul_reduce_scatter, record_choices
from pallas_kernels.collective_matmul import mosaic
from tests.compilation import run_jitted

NEEDS_MOSAIC = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
ROWS = P("tensor", None)
COLUMNS = P(None, "tensor")
GATHER = all_gather_matmul, (ROWS, COLUMNS), COLUMNS
SCATTER = matmul_reduce_scatter, (COLUMNS, ROWS), ROWS


def mesh(devices, **others):
    shape = (*others.values(), devices)
    names = (*others, "tensor")
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def sharded(form, devices, check_vma=False, **options):
    operation, ins, outs = form
    local = functools.partial(operation, axis_name="tensor", **options)
    return jax.shard_map(local, mesh=mesh(devices), in_specs=ins, out_specs=outs, check_vma=check_vma)


def with_gradients(function, x, w, worth):
    def total(x, w):
        out = function(x, w)
        return (out * worth).sum(), out

    return run_jitted(jax.value_and_grad(total, argnums=(0, 1), has_aux=True), x, w)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("form", [GATHER, SCATTER], ids=["gather", "scatter"])
def test_values_and_gradients_are_those_of_one_device(form, devices, check_vma):
    x = normal(24, 36)
    w = normal(36, 48, seed=1)
    worth = normal(24, 48, seed=2)
    got = with_gradients(sharded(form, devices, check_vma), x, w, worth)
    want = with_gradients(lambda x, w: jnp.dot(x, w, precision="highest"), x, w, worth)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic", marks=NEEDS_MOSAIC)])
def test_rows_gathered_once_for_several_weights(monkeypatch, implementation):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    devices = 1 if implementation == "mosaic" else 4
    x = normal(128, 128)
    first = normal(128, 256, seed=1) / 11
    second = normal(128, 128, seed=2) / 11
    arrays = [a.astype(jnp.bfloat16 if implementation == "mosaic" else jnp.float32) for a in (x, first, second)]
    local = functools.partial(all_gather_matmul, axis_name="tensor", implementation=implementation)
    specs = (ROWS, (COLUMNS, COLUMNS)), (COLUMNS, COLUMNS)
    gathering = jax.shard_map(local, mesh=mesh(devices), in_specs=specs[0], out_specs=specs[1], check_vma=False)

    def total(product, x, first, second):
        parts = product(x, (first, second))
        return sum((part.astype(jnp.float32) ** 2).sum() for part in parts)

    def plain(x, weights):
        return tuple(jnp.dot(x, w, precision="highest") for w in weights)

    got = run_jitted(jax.grad(functools.partial(total, gathering), (0, 1, 2)), *arrays)
    want = run_jitted(jax.grad(functools.partial(total, plain), (0, 1, 2)), x, first, second)
    for mine, exact in zip(got, want, strict=True):
        tolerance = 0.02 if implementation == "mosaic" else 1e-5
        np.testing.assert_allclose(np.asarray(mine, np.float32), exact, atol=tolerance * float(jnp.abs(exact).max()))


def test_an_mlp_in_bfloat16_is_as_exact_as_plain_matmuls():
    x = normal(32, 64)
    up = normal(64, 128, seed=1) / 8
    down = normal(128, 64, seed=2) / 11
    arrays = [a.astype(jnp.bfloat16) for a in (x, up, down)]

    def local(x, up, down):
        hidden = jax.nn.silu(all_gather_matmul(x, up, axis_name="tensor"))
        return matmul_reduce_scatter(hidden, down, axis_name="tensor")

    mlp = jax.shard_map(local, mesh=mesh(4), in_specs=(ROWS, COLUMNS, ROWS), out_specs=ROWS, check_vma=False)

    def plain(x, up, down):
        return jnp.dot(jax.nn.silu(jnp.dot(x, up)), down)

    def gradients(function, arguments):
        return run_jitted(jax.grad(lambda *a: (function(*a).astype(jnp.float32) ** 2).sum(), (0, 1, 2)), *arguments)

    exact = gradients(plain, [a.astype(jnp.float32) for a in arrays])
    for got, its, want in zip(gradients(mlp, arrays), gradients(plain, arrays), exact, strict=True):
        assert got.dtype == jnp.bfloat16
        mine, others = (float(jnp.abs(a.astype(jnp.float32) - want).mean()) for a in (got, its))
        assert mine <= 2 * others


@pytest.mark.parametrize("form", [GATHER, SCATTER], ids=["gather", "scatter"])
def test_its_communication_is_one_collective_a_pass(form):
    x = normal(24, 36)
    w = normal(36, 48, seed=1)

    def loss(x, w):
        return (sharded(form, 4)(x, w) ** 2).sum()

    lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(x, w).as_text()
    assert lowered.count("stablehlo.all_gather") == 1 and lowered.count("stablehlo.reduce_scatter") == 1


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "w", "reason"),
    [
        (normal(2, 8, 16), normal(16, 8), "reshape x"),
        (normal(8, 16), normal(8, 16), "as many as w's rows"),
        (normal(8, 16, dtype=jnp.bfloat16), normal(16, 8), "one dtype"),
    ],
)
@pytest.mark.parametrize("operation", [all_gather_matmul, matmul_reduce_scatter])
def test_bad_arguments_are_explained(operation, x, w, reason):
    with pytest.raises(ValueError, match=reason):
        operation(x, w, axis_name="tensor")


def test_outside_of_shard_map_the_way_in_is_named():
    with pytest.raises(ValueError, match="inside jax.shard_map over the axis 'tensor'"):
        all_gather_matmul(normal(8, 16), normal(16, 8), axis_name="tensor")


def test_rows_that_the_devices_do_not_divide():
    whole = jax.shard_map(
        functools.partial(matmul_reduce_scatter, axis_name="tensor"),
        mesh=mesh(4),
        in_specs=(COLUMNS, ROWS),
        out_specs=ROWS,
        check_vma=False,
    )
    with pytest.raises(ValueError, match="30 rows"):
        jax.eval_shape(whole, normal(30, 16), normal(16, 8))


def refusal(tokens=512, width=256, inner=512, dtype=jnp.bfloat16, devices=2, platform="cuda", **others):
    local = functools.partial(all_gather_matmul, axis_name="tensor", implementation="mosaic")
    mapped = jax.shard_map(
        local, mesh=mesh(devices, **others), in_specs=(ROWS, COLUMNS), out_specs=COLUMNS, check_vma=False
    )
    with lowering_platform(platform), pytest.raises(NotSupported) as caught:
        jax.eval_shape(mapped, normal(tokens, width, dtype=dtype), normal(width, inner, dtype=dtype))
    return str(caught.value)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="refuses every call there")
def test_what_the_kernels_refuse():
    assert "Hopper" in refusal(platform="cpu")
    assert "multiple of 128, got 192" in refusal(tokens=384)
    assert "multiples of 128, got 192 and 256" in refusal(width=192)
    assert "bfloat16" in refusal(dtype=jnp.float32)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="has what the kernels need")
def test_an_older_jax_is_refused():
    assert "needs jax 0.11" in refusal()


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="is refused there")
@pytest.mark.parametrize(("tokens", "backend"), [(256, "xla"), (16384, "mosaic")])
def test_by_itself_it_takes_the_kernel_where_there_is_enough_to_multiply(tokens, backend):
    x = jax.ShapeDtypeStruct((tokens, 2048), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16)
    with lowering_platform("cuda"), record_choices() as choices:
        jax.eval_shape(sharded(GATHER, 2), x, w)
    assert choices[0].backend == backend
    assert backend == "mosaic" or "too little to work on" in choices[0].refused[0][1]


# --- our kernels, interpreted on one device -----------------------------------------------------------------------


@NEEDS_MOSAIC
@pytest.mark.parametrize("form", [GATHER, SCATTER], ids=["gather", "scatter"])
def test_the_kernels_product_and_gradients(monkeypatch, form):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    x, w, worth = (normal(*s, seed=i) for i, s in enumerate([(128, 128), (128, 128), (128, 128)]))
    narrow = [a.astype(jnp.bfloat16) for a in (x, w, worth)]
    got = with_gradients(sharded(form, 1, implementation="mosaic"), narrow[0], narrow[1], narrow[2])
    want = with_gradients(lambda x, w: jnp.dot(x, w), x, w, worth)
    for mine, exact in zip(jax.tree.leaves(got)[1:], jax.tree.leaves(want)[1:], strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float32), exact, atol=0.02 * float(jnp.abs(exact).max()))
