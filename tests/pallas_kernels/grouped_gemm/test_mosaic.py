"""The Hopper kernels of the grouped matmul: interpreted with race detection, and compiled for an H200."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import NotSupported, grouped_matmul, grouped_matmul_alignment, lowering_platform, record_choices
from pallas_kernels.grouped_gemm import mosaic
from pallas_kernels.grouped_gemm.mosaic_kernels import TileGrid
from tests.hopper import compile_for_hopper, hopper_array, hopper_mesh
from tests.pallas_kernels.grouped_gemm.cases import Case, check

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")

CASES = {
    "depth_of_half_a_tile": Case((100, 0, 60), depth=192, columns=64, alignment=128),
    "uneven": Case((100, 0, 150), depth=128, columns=192),
    "aligned": Case((128, 1, 0, 300), depth=128, columns=64, alignment=128, dtype="float16"),
    "more_slices_than_stages": Case((70, 10), depth=384, columns=128, alignment=128),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_error_at_most_twice_the_plain_version_and_no_race(name, monkeypatch, capfd):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    check(CASES[name], "mosaic")
    captured = capfd.readouterr()
    assert "RACE" not in captured.out + captured.err


@pytest.mark.parametrize("panels", [(5, 3), (16, 2), (40, 7), (1, 1)])
def test_every_tile_has_one_turn(panels):
    shape = TileGrid(*panels, 64)
    down, across = jax.vmap(shape.place)(jnp.arange(shape.items))
    found = sorted(zip(down.tolist(), across.tolist(), strict=True))
    assert found == [(i, j) for i in range(panels[0]) for j in range(panels[1])]


def shapes(rows=1024, groups=4, depth=512, columns=768):
    return (
        jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16),
        jax.ShapeDtypeStruct((groups, depth, columns), jnp.bfloat16),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    )


def loss(x, weights, sizes):
    return (grouped_matmul(x, weights, sizes, alignment=128).astype(jnp.float32) ** 2).sum()


@pytest.mark.parametrize("columns", [768, 1408])
def test_compiled_for_hopper_without_spills(columns, monkeypatch, capfd):
    """256 and 128 columns a tile; each of the three products is one launch, without a copy of the rows."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    with lowering_platform("cuda"):
        compiled = compile_for_hopper(jax.grad(loss, argnums=(0, 1)), *shapes(columns=columns))
    report = "".join(capfd.readouterr())
    spills = dict(re.findall(r"properties for (\w+)_mosaic_gpu_kernel\n.* (\d+) bytes spill stores", report))
    assert set(spills) == {"grouped_matmul", "grouped_matmul_transposed", "grouped_matmul_weights"}
    assert set(spills.values()) == {"0"}
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", report)]
    assert max(registers) <= 168, "what three warpgroups can have at the start"
    assert "serialized" not in report
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 3 and " gather(" not in text


def test_the_default_choice():
    with lowering_platform("cuda"), record_choices() as choices:
        assert grouped_matmul_alignment(1024, 4) == mosaic.TILE_ROWS
        jax.eval_shape(loss, *shapes())
        jax.eval_shape(loss, *shapes(depth=96))
    assert [choice.backend for choice in choices] == ["mosaic", "xla"]
    assert "multiples of 64" in choices[1].refused[0][1]


def test_under_scan_remat_and_shard_map():
    mesh = hopper_mesh({"expert": 2, "tensor": 2})
    spec = P("expert", None, "tensor")

    def layers(x, weights, sizes):
        def layer(x, matrices):
            return x + grouped_matmul(x, matrices, sizes, alignment=128), None

        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(jnp.float32) ** 2).sum()

    def local(x, weights, sizes):
        return jax.shard_map(
            lambda *arrays: jax.lax.psum(layers(*arrays), ("expert", "tensor")),
            mesh=mesh,
            in_specs=(P(), P(None, *spec), P("expert")),
            out_specs=P(),
            check_vma=False,
        )(x, weights, sizes)

    arrays = (
        hopper_array((512, 128), jnp.bfloat16, mesh),
        hopper_array((3, 4, 128, 256), jnp.bfloat16, mesh, P(None, *spec)),
        hopper_array((4,), jnp.int32, mesh, P("expert")),
    )
    with lowering_platform("cuda"):
        text = compile_for_hopper(jax.grad(local, argnums=(0, 1)), *arrays, mesh=mesh).as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 3, "the forward of the last layer is not needed again"


def test_refuses_where_xla_would_have_to_partition():
    mesh = hopper_mesh({"data": 2})
    with (
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        lowering_platform("cuda"),
        pytest.raises(NotSupported, match="shard_map"),
    ):
        jax.eval_shape(lambda *a: grouped_matmul(*a, implementation="mosaic"), *shapes())


def test_refuses_other_devices():
    with lowering_platform("cuda", (8, 0)), pytest.raises(NotSupported, match="compute capability 9.0"):
        jax.eval_shape(lambda *a: grouped_matmul(*a, implementation="mosaic"), *shapes())
