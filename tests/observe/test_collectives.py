"""Collectives of really compiled programs: eight simulated CPU devices, and ahead of time for four H200s."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxstack.observe.collectives import Collective, collectives, fp8_matmuls, matmuls, summarise
from tests.compilation import fully_optimized
from tests.hopper import compile_for_hopper, hopper_array, hopper_mesh

TRIPS = 5
# float32; 4 MiB a shard on a 2 x 2 mesh: large enough to be worth overlapping
ROWS = 512
COLUMNS = 4096
AXES = {"data": 2, "tensor": 2}


def _gather_and_drop(x):
    return jax.lax.all_gather(x, "tensor", axis=0, tiled=True)[: x.shape[0]]


def _scatter_and_repeat(x):
    return jnp.concatenate([jax.lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)] * 2)


def _exchange(x):
    return jax.lax.all_to_all(x, "tensor", 0, 0, tiled=True)


def _swap(x):
    return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])


SHARD = ROWS // 2 * COLUMNS // 2 * 4
# name: (operation on a shard, kind, axis, payload bytes, wire bytes a device sends)
OPERATIONS = {
    "psum": (lambda x: jax.lax.psum(x, "tensor"), "all-reduce", "tensor", SHARD, SHARD),
    "all_gather": (_gather_and_drop, "all-gather", "tensor", 2 * SHARD, SHARD),
    "psum_scatter": (_scatter_and_repeat, "reduce-scatter", "data", SHARD, SHARD // 2),
    "all_to_all": (_exchange, "all-to-all", "tensor", SHARD, SHARD // 2),
    "ppermute": (_swap, "collective-permute", "data", SHARD, SHARD),
}


def _looped(operation, mesh):
    def body(x):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(operation(carry)), None), x, length=TRIPS)[0]

    specs = P("data", "tensor")
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)


def _cpu_mesh(shape, names):
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    count = 1
    for size in shape:
        count *= size
    return jax.make_mesh(shape, names, axis_types=kinds, devices=jax.devices()[:count])


@fully_optimized()
def _compile_on_cpu(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


@pytest.mark.parametrize("name", OPERATIONS)
def test_looped_collective_on_h200(name):
    operation, kind, axis, payload, wire = OPERATIONS[name]
    mesh = hopper_mesh(AXES)
    argument = hopper_array((ROWS, COLUMNS), jnp.float32, mesh, P("data", "tensor"))
    text = compile_for_hopper(_looped(operation, mesh), argument).as_text()
    (row,) = collectives(text, AXES)
    assert (row.kind, row.dtype, row.axes, row.group_size) == (kind, "f32", (axis,), 2)
    assert (row.payload_bytes, row.wire_bytes) == (payload, wire)
    assert row.device_ids == ((0, 1) if axis == "tensor" else (0, 2))
    assert (row.calls, row.exact, row.in_loop) == (TRIPS, True, True)
    assert "shard_map/while/body" in row.op_name


@pytest.mark.parametrize("name", ["psum", "all_gather", "all_to_all", "ppermute"])
def test_looped_collective_on_eight_cpu_devices(name):
    operation, kind, axis, payload, wire = OPERATIONS[name]
    axes = {"data": 2, "tensor": 4}
    mesh = _cpu_mesh((2, 4), tuple(axes))
    shard = SHARD // 2
    argument = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, sharding=NamedSharding(mesh, P("data", "tensor")))
    (row,) = collectives(_compile_on_cpu(_looped(operation, mesh), argument), axes)
    n = axes[axis]
    assert (row.kind, row.axes, row.group_size, row.calls) == (kind, (axis,), n, TRIPS)
    assert row.payload_bytes == shard * (n if kind == "all-gather" else 1)
    factor = {"all-reduce": 2, "collective-permute": n / (n - 1)}.get(kind, 1)
    assert row.wire_bytes == row.payload_bytes * factor * (n - 1) / n
    assert not row.asynchronous


def test_nested_loops_multiply():
    axes = {"data": 8}
    mesh = _cpu_mesh((8,), ("data",))

    def body(x):
        def inner(_, y):
            return jnp.tanh(jax.lax.psum(y, "data"))

        return jax.lax.fori_loop(0, 6, lambda _, y: jax.lax.fori_loop(0, 7, inner, y) * 2, x)

    function = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    rows = collectives(_compile_on_cpu(function, jnp.ones((8, 300))), axes)
    assert sum(row.calls for row in rows) == 42
    assert all(row.exact and row.device_ids == tuple(range(8)) for row in rows)


def test_unknown_trip_count_is_marked():
    mesh = _cpu_mesh((2,), ("data",))

    def body(x):
        return jax.lax.while_loop(lambda y: y.sum() < 1e3, lambda y: y + jax.lax.psum(y, "data"), x)

    function = jax.shard_map(body, mesh=mesh, in_specs=P(None), out_specs=P(None), check_vma=False)
    (row,) = collectives(_compile_on_cpu(function, jnp.ones(16)), {"data": 2})
    assert (row.calls, row.exact, row.in_loop) == (1, False, True)


def test_double_buffered_loop_counts_every_trip():
    """The scheduler peels one trip of seven and unrolls the rest by two: three instructions, seven calls."""
    mesh = hopper_mesh(AXES)
    operation = OPERATIONS["ppermute"][0]

    def body(x):
        return jax.lax.fori_loop(0, 7, lambda _, y: operation(jnp.tanh(y)), x)

    function = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    argument = hopper_array((ROWS, COLUMNS), jnp.float32, mesh, P("data"))
    options = {"xla_gpu_enable_while_loop_double_buffering": True}
    rows = collectives(compile_for_hopper(function, argument, options=options).as_text(), AXES)
    assert len(rows) == 3
    assert sum(row.calls for row in rows) == 7


def test_gspmd_gradient_on_h200():
    """A weight sharded over `data` is gathered for use and its gradient is reduce-scattered, in bfloat16."""
    mesh = hopper_mesh({"data": 4})
    x = hopper_array((4096, 1024), jnp.bfloat16, mesh, P("data"))
    w = hopper_array((1024, 4096), jnp.bfloat16, mesh, P("data"))

    def loss(w, x):
        whole = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        return jnp.square(x @ whole).sum()

    step = jax.jit(jax.value_and_grad(loss), out_shardings=(NamedSharding(mesh, P()), w.sharding))
    text = compile_for_hopper(step, w, x).as_text()
    large = {row.kind: row for row in collectives(text, {"data": 4}) if row.payload_bytes > 1024}
    assert set(large) == {"all-gather", "reduce-scatter"}
    for row in large.values():
        assert (row.dtype, row.payload_bytes) == ("bf16", 1024 * 4096 * 2)
        assert row.wire_bytes == 3 * row.payload_bytes // 4
        assert (row.axes, row.device_ids, row.calls) == (("data",), (0, 1, 2, 3), 1)
    assert matmuls(text) == 2


def test_overlapped_collective_is_asynchronous_and_lone_one_is_not():
    mesh = hopper_mesh({"tensor": 4})

    def overlapped(x, w):
        return jax.lax.psum(x, "tensor"), w @ w @ w

    specs = (P("tensor"), P())
    function = jax.shard_map(overlapped, mesh=mesh, in_specs=specs, out_specs=(P(), P()), check_vma=False)
    x = hopper_array((4096, 4096), jnp.float32, mesh, P("tensor"))
    w = hopper_array((8192, 8192), jnp.bfloat16, mesh)
    (row,) = collectives(compile_for_hopper(function, x, w).as_text(), {"tensor": 4})
    assert row.asynchronous

    lone = jax.shard_map(lambda x: jax.lax.psum(x, "tensor"), mesh=mesh, in_specs=P("tensor"), out_specs=P())
    (row,) = collectives(compile_for_hopper(lone, x).as_text(), {"tensor": 4})
    assert not row.asynchronous
    assert row.payload_bytes == 4096 * 4096


def test_matmuls_and_fp8_matmuls_on_h200():
    def step(x, weights, wide, scale):
        def layer(x, w):
            scaled = x.astype(jnp.bfloat16) * scale
            y = jax.lax.dot(scaled, w.astype(jnp.bfloat16) * scale, preferred_element_type=jnp.bfloat16)
            return y.astype(jnp.float8_e4m3fn), None

        x = jax.lax.scan(layer, x, weights)[0]
        return x.astype(jnp.bfloat16) @ wide

    fp8 = jnp.float8_e4m3fn
    shapes = [((512, 512), fp8), ((3, 512, 512), fp8), ((512, 1024), jnp.bfloat16), ((), jnp.bfloat16)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    text = compile_for_hopper(step, *arguments, options={"xla_gpu_enable_triton_gemm": False}).as_text()
    assert matmuls(text) == 4
    assert fp8_matmuls(text) == 3


def test_dot_counts_as_fp8_only_with_two_fp8_operands():
    def both(x, w):
        return jax.lax.dot(x, w, preferred_element_type=jnp.float32)

    shape = (512, 512)
    fp8, bf16 = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float8_e4m3fn, jnp.bfloat16))
    text = compile_for_hopper(both, bf16, bf16).as_text()
    assert (matmuls(text), fp8_matmuls(text)) == (1, 0)
    text = compile_for_hopper(both, fp8, fp8).as_text()
    assert (matmuls(text), fp8_matmuls(text)) == (1, 1)


HAND_WRITTEN = """\
HloModule step, is_scheduled=true, entry_computation_layout={()->f32[]}, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: bf16[64,128]) -> bf16[512,128] {
  %p = bf16[64,128]{1,0} parameter(0)
  ROOT %gather = bf16[512,128]{1,0} all-gather(%p), replica_groups={}, dimensions={0}
}

%sliced (q: f32[4,64], i: s32[]) -> f32[32] {
  %q = f32[4,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %slice = f32[64]{0} dynamic-slice(%q, %i), dynamic_slice_sizes={1,64}
  ROOT %scatter = f32[32]{0} reduce-scatter(%slice), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
}

%fused_all-reduce (r: f32[16]) -> f32[16] {
  %r = f32[16]{0} parameter(0)
  ROOT %reduce = f32[16]{0} all-reduce(%r), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
}

%chosen (s: f32[16]) -> f32[16] {
  %s = f32[16]{0} parameter(0)
  ROOT %moved = f32[16]{0} collective-permute(%s), source_target_pairs={{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}
}

%other (t: f32[16]) -> f32[16] {
  ROOT %t = f32[16]{0} parameter(0)
}

ENTRY %main (x: bf16[64,128], y: f32[4,64], z: f32[16], k: s32[]) -> f32[] {
  %x = bf16[64,128]{1,0} parameter(0)
  %y = f32[4,64]{1,0} parameter(1)
  %z = f32[16]{0} parameter(2)
  %k = s32[] parameter(3)
  %long = ((bf16[64,128]{1,0}), bf16[512,128]{1,0}, /*index=2*/s32[]) async-start(%x), calls=%wrapped
  %short = ((f32[16]{0}, f32[16]{0}), (f32[16]{0}, f32[16]{0})) all-reduce-start(%z, %z), \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %fused = f32[32]{0} fusion(%y, %k), kind=kCustom, calls=%sliced
  %own = ((f32[16]{0}), f32[16]{0}) fusion-start(%z), kind=kCustom, calls=%fused_all-reduce, \
metadata={op_name="small sum"}
  %owned = f32[16]{0} fusion-done(%own), calls=%fused_all-reduce
  %reduced = (f32[16]{0}, f32[16]{0}) all-reduce-done(%short)
  %gathered = bf16[512,128]{1,0} async-done(%long), calls=%wrapped
  %picked = f32[16]{0} conditional(%k, %z, %z), branch_computations={%chosen, %other}
  %token = token[] after-all()
  %sent = (f32[16]{0}, u32[], token[]) send(%z, %token), \
frontend_attributes={_xla_send_recv_source_target_pairs="{{0,4},{1,5}}"}
  ROOT %zero = f32[] constant(0)
}
"""


def test_forms_of_the_gpu_scheduler():
    """Wrapped, fused, combined and conditional collectives each count once."""
    axes = {"data": 2, "tensor": 4}
    rows = {row.name: row for row in collectives(HAND_WRITTEN, axes)}
    assert set(rows) == {"gather", "short", "scatter", "reduce", "moved", "sent"}

    def described(name):
        row = rows[name]
        return row.kind, row.axes, row.payload_bytes, row.wire_bytes, row.asynchronous, row.exact

    gathered = 512 * 128 * 2
    assert described("gather") == ("all-gather", ("data", "tensor"), gathered, gathered * 7 // 8, True, True)
    assert described("short") == ("all-reduce", ("tensor",), 128, 192, True, True)
    assert described("scatter") == ("reduce-scatter", ("tensor",), 256, 128, False, True)
    assert described("reduce") == ("all-reduce", ("data",), 64, 64, True, True)
    assert described("moved") == ("collective-permute", ("tensor",), 64, 64, False, False)
    assert described("sent") == ("send", ("data",), 64, 64, True, True)
    assert rows["reduce"].device_ids == (0, 4)
    assert rows["moved"].device_ids == (0, 1, 2, 3)
    assert rows["reduce"].op_name == "small sum"


def test_synchronous_start_is_not_asynchronous():
    text = HAND_WRITTEN.replace("to_apply=%add\n  %fused", 'to_apply=%add, backend_config={"is_sync":true}\n  %fused')
    rows = {row.name: row for row in collectives(text)}
    assert not rows["short"].asynchronous
    assert rows["short"].axes == ()


def test_summary_adds_calls_up():
    row = Collective(
        kind="all-gather",
        dtype="bf16",
        payload_bytes=100,
        wire_bytes=75,
        group_size=4,
        device_ids=(0, 1, 2, 3),
        axes=("fsdp",),
        asynchronous=True,
        calls=3,
        exact=True,
        in_loop=True,
        name="a",
        op_name="",
    )
    heavier = dataclasses.replace(row, kind="all-reduce", wire_bytes=1000, axes=(), exact=False)
    table = summarise([row, dataclasses.replace(row, calls=2), heavier])
    assert [entry["kind"] for entry in table] == ["all-reduce", "all-gather"]
    assert table[1] == {
        "kind": "all-gather",
        "dtype": "bf16",
        "axes": "fsdp",
        "in_loop": True,
        "asynchronous": True,
        "instructions": 2,
        "calls": 5,
        "payload_bytes": 500,
        "wire_bytes": 375,
        "exact": True,
    }
    assert table[0]["axes"] == "4 devices" and not table[0]["exact"]


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        collectives("not a module")
