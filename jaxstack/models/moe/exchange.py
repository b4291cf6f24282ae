"""Expert parallelism: tokens sorted by expert, and all-to-all exchanges with the devices of their experts.

Each pair of devices has a buffer of `slots` rows, which `lax.all_to_all` exchanges. Rows that do not fit are sent in
further rounds, as many as the fullest pair needs, so an imbalance never drops a token, and the memory is that of one
round: rows for `exchange_factor` times an even load. The first round is differentiated as usual; further rounds, which
are rare, recompute their forward pass in the backward pass.

`take_rows` and `sum_rows` are each other's transpose. Both are gathers, forward and backward, so that no scatter adds
up rows in an order that differs between runs.

Dims: n devices, C slots, t tokens, k experts per token, N = t k assignments, E experts, G = E / n per device, D model,
R rows.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import PackedWeight, grouped_matmul_alignment
from pallas_kernels.batch_invariant.rows import row_total
from pallas_kernels.grouped_gemm.groups import aligned_rows, group_bounds
from pallas_kernels.weight_only.packed import is_packed


class Rows(NamedTuple):
    """Mapping between (token, expert) assignments and the rows of an array that is sorted by expert."""

    source: Int[Array, " R"]
    """Assignment in each row, counted token by token; N for an empty row."""
    place: Int[Array, "t k"]
    """Row of each assignment; R for an assignment without a row."""


class Order(NamedTuple):
    """Result of sorting assignments by expert: permutation, its inverse, and the start of each expert's group."""

    order: Int[Array, " N"]
    """Assignments sorted by group; those of no group last."""
    position: Int[Array, " N"]
    """Index of each assignment in `order`."""
    first: Int[Array, " G+1"]
    """Start of each group in `order`, and the end of the last one."""


def sort_by_group(groups: Int[Array, " N"], count: int) -> Order:
    """Sort (token, expert) assignments by `groups`, their expert ids; ids >= `count` are sorted last, in no group."""
    numbers = jnp.arange(groups.shape[0], dtype=jnp.int32)
    ordered, order = jax.lax.sort((groups, numbers), num_keys=1, is_stable=True)
    position = jnp.zeros_like(order).at[order].set(numbers, unique_indices=True)
    first = jnp.searchsorted(ordered, jnp.arange(count + 1, dtype=groups.dtype), method="compare_all")
    return Order(order, position, first.astype(jnp.int32))


def arrange(assigned: Int[Array, "t k"], count: int, alignment: int) -> tuple[Rows, Int[Array, " G"]]:
    """Assign (token, expert) pairs to rows of an array, sorted by group (expert), with each group's start aligned.

    Args:
      assigned: group of each assignment; `count` and above mean no group.

    Returns:
      The rows, and the size of each group.
    """
    groups = assigned.reshape(-1)
    order, position, first = sort_by_group(groups, count)
    sizes = first[1:] - first[:-1]
    rows = aligned_rows(groups.shape[0], count, alignment)
    starts, _ = group_bounds(sizes, alignment)
    row = jnp.arange(rows, dtype=jnp.int32)
    group = group_of_rows(sizes, rows, alignment)
    offset = row - starts[group]
    filled = (offset >= 0) & (offset < sizes[group])
    source = jnp.where(filled, order.at[first[:-1][group] + offset].get(mode="clip"), groups.shape[0])
    shift = (starts - first[:-1]).at[groups].get(mode="fill", fill_value=0)
    place = jnp.where(groups < count, position + shift, rows)
    return Rows(source, place.reshape(assigned.shape)), sizes


def _spread(x: jax.Array, rows: Rows) -> jax.Array:
    return x.at[rows.source // rows.place.shape[1]].get(mode="fill", fill_value=0)


def _collect(y: jax.Array, rows: Rows) -> jax.Array:
    found = y.at[rows.place].get(mode="fill", fill_value=0)
    return row_total(found.astype(jnp.promote_types(y.dtype, jnp.float32)), axis=1)[:, 0].astype(y.dtype)


@jax.custom_vjp
def take_rows(x: Float[Array, "t D"], rows: Rows) -> Float[Array, "R D"]:
    """Copy each token to the rows of its k experts; rows without a token are 0."""
    return _spread(x, rows)


def _take_forward(x: jax.Array, rows: Rows) -> tuple:
    return _spread(x, rows), rows


def _take_backward(rows: Rows, gradient: jax.Array) -> tuple:
    return _collect(gradient, rows), None


take_rows.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def sum_rows(y: Float[Array, "R D"], rows: Rows) -> Float[Array, "t D"]:
    """Sum the k rows (expert outputs) of each token, in float32."""
    return _collect(y, rows)


def _sum_forward(y: jax.Array, rows: Rows) -> tuple:
    return _collect(y, rows), rows


def _sum_backward(rows: Rows, gradient: jax.Array) -> tuple:
    return _spread(gradient, rows), None


sum_rows.defvjp(_sum_forward, _sum_backward)


def take_weights(weights: Float[Array, "t k"], rows: Rows) -> Float[Array, " R"]:
    """Copy the router's weight of each (token, expert) pair to its row; rows without a token get 0."""
    return take_rows(weights.reshape(-1, 1), Rows(rows.source, rows.place.reshape(-1, 1)))[:, 0]


@jax.custom_vjp
def take_group(values: Float[Array, "G F"], group: Int[Array, " R"]) -> Float[Array, "R F"]:
    """Copy to each row the values of its group, such as the bias of its expert."""
    return values[group]


def _group_forward(values: jax.Array, group: jax.Array) -> tuple:
    return values[group], (values, group)


def _group_backward(saved: tuple, gradient: jax.Array) -> tuple:
    # A product in place of a scatter, whose order of sums differs between runs.
    values, group = saved
    belongs = jax.nn.one_hot(group, values.shape[0], dtype=gradient.dtype)
    sums = jnp.einsum("rg,rf->gf", belongs, gradient, preferred_element_type=jnp.float32)
    return sums.astype(values.dtype), None


take_group.defvjp(_group_forward, _group_backward)


def group_of_rows(sizes: Int[Array, " G"], rows: int, alignment: int) -> Int[Array, " R"]:
    """Return the group of each of `rows` rows that `arrange` laid out; empty rows belong to any group."""
    ends = group_bounds(sizes, alignment)[1]
    found = jnp.searchsorted(ends, jnp.arange(rows, dtype=jnp.int32), side="right", method="compare_all")
    return jnp.minimum(found, sizes.shape[0] - 1)


Kernels = Mapping[str, jax.Array | PackedWeight]
"""Matrices and biases of the experts, by name, each with a leading dim of experts; matrices may be packed."""

Compute = Callable[[jax.Array, jax.Array, Kernels, jax.Array, int], jax.Array]
"""(rows [R, D], their weights [R], kernels, sizes of the groups [G], their alignment) -> weighted results [R, D].

The weights are applied here, not where the results are summed: the backward pass then does not need the results, so a
recomputing layer repeats one exchange and one matmul less.
"""

AXIS = "expert"
_SLOT_MULTIPLE = 8
"""Slots are rounded up to a multiple of this."""


def compute_on_this_device(
    compute: Compute,
    x: Float[Array, "t D"],
    experts: Int[Array, "t k"],
    weights: Float[Array, "t k"],
    kernels: Kernels,
    *,
    fp8: bool = False,
) -> Float[Array, "t D"]:
    """Compute each token's weighted sum of experts, all of which are on this device.

    Args:
      experts: experts of each token; ids beyond the last expert are dropped.
      fp8: True if `compute` multiplies in FP8.
    """
    count = jax.tree.leaves(kernels)[0].shape[0]
    alignment = grouped_matmul_alignment(experts.size, count, fp8=fp8, packed=_is_packed(kernels))
    rows, sizes = arrange(experts, count, alignment)
    return sum_rows(compute(take_rows(x, rows), take_weights(weights, rows), kernels, sizes, alignment), rows)


def _is_packed(kernels: Kernels) -> bool:
    return any(map(is_packed, kernels.values()))


def count_buffer_rows(assignments: int, devices: int, factor: float, max_rows: int) -> int:
    """Return the all-to-all buffer's rows per pair of devices: `factor` times an even load, at most `max_rows`."""
    wanted = -int(-assignments * factor // devices)
    return min(-(-wanted // _SLOT_MULTIPLE) * _SLOT_MULTIPLE, max_rows)


class ExchangePlan(NamedTuple):
    """Plan of the all-to-all of tokens: assignments sorted by expert, and the number of rows from each device."""

    experts: Int[Array, "t k"]
    order: Order
    """Assignments sorted by expert, and so by device."""
    arriving: Int[Array, "n G"]
    """Number of rows that each device sends to each expert of this device."""


class _Static(NamedTuple):
    """Compile-time constants of the all-to-all of tokens: expert function, devices, buffer rows, whether in FP8."""

    compute: Compute
    devices: int
    slots: int
    fp8: bool


Operands = tuple[jax.Array, jax.Array, Kernels]
"""Tokens [t, D], weights [t, k] and kernels: what is differentiated."""


def compute_on_expert_devices(
    compute: Compute,
    x: Float[Array, "t D"],
    experts: Int[Array, "t k"],
    weights: Float[Array, "t k"],
    kernels: Kernels,
    *,
    devices: int,
    factor: float,
    max_rows: int | None = None,
    fp8: bool = False,
) -> Float[Array, "t D"]:
    """Compute each token's weighted sum of experts, which are sharded over the mesh axis `expert`.

    Args:
      kernels: this device's part of the experts.
      devices: size of the axis.
      factor: rows of a round as a multiple of an even load.
      max_rows: largest number of rows that one device sends to another, if the caller knows it; None: no bound but all
        of its assignments.
      fp8: True if `compute` multiplies in FP8.
    """
    local = jax.tree.leaves(kernels)[0].shape[0]
    flat = experts.reshape(-1)
    max_rows = min(flat.shape[0], max_rows or flat.shape[0])
    slots = count_buffer_rows(flat.shape[0], devices, factor, max_rows)
    order = sort_by_group(flat, devices * local)
    counts = (order.first[1:] - order.first[:-1]).reshape(devices, local)
    plan = ExchangePlan(experts, order, jax.lax.all_to_all(counts, AXIS, 0, 0, tiled=True))
    static = _Static(compute, devices, slots, fp8)
    operands = (x, weights, kernels)
    if slots >= max_rows:
        return _run_round(static, operands, plan, 0)
    fullest = jax.lax.pmax(counts.sum(axis=1).max(), AXIS)
    return _in_rounds(static, operands, plan, (fullest + slots - 1) // slots)


def _run_round(static: _Static, operands: Operands, plan: ExchangePlan, number: int | jax.Array) -> jax.Array:
    """Send one round's tokens to their experts and the outputs back; return the round's part of the result [t, D]."""
    x, weights, kernels = operands
    devices = static.devices
    slots = static.slots
    rows = _sent_rows(static, plan, number)
    received = _all_to_all(take_rows(x, rows), devices)
    weights = _all_to_all(take_weights(weights, rows)[:, None], devices)
    local = plan.arriving.shape[1]
    slot = jnp.arange(slots, dtype=jnp.int32) + number * slots
    ends = jnp.cumsum(plan.arriving, axis=1)
    groups = (slot[None, :, None] >= ends[:, None, :]).sum(axis=-1, dtype=jnp.int32).reshape(-1, 1)
    alignment = grouped_matmul_alignment(devices * slots, local, fp8=static.fp8, packed=_is_packed(kernels))
    local_rows, sizes = arrange(groups, local, alignment)
    results = static.compute(
        take_rows(received, local_rows), take_weights(weights, local_rows), kernels, sizes, alignment
    )
    return sum_rows(_all_to_all(sum_rows(results, local_rows), devices), rows)


def _sent_rows(static: _Static, plan: ExchangePlan, number: int | jax.Array) -> Rows:
    """Return the assignment (token, expert) in each row of one round's send buffer, grouped by target device."""
    devices = static.devices
    slots = static.slots
    local = plan.arriving.shape[1]
    first = plan.order.first[::local]
    offset = jnp.arange(slots, dtype=jnp.int32) + number * slots
    filled = offset < (first[1:] - first[:-1])[:, None]
    index = first[:-1, None] + offset
    assignments = plan.experts.size
    source = jnp.where(filled, plan.order.order.at[index].get(mode="clip"), assignments).reshape(-1)
    device = plan.experts // local
    slot = plan.order.position.reshape(device.shape) - first.at[device].get(mode="clip") - number * slots
    inside = (slot >= 0) & (slot < slots) & (device < devices)
    return Rows(source, jnp.where(inside, device * slots + slot, devices * slots))


def _all_to_all(rows: jax.Array, devices: int) -> jax.Array:
    blocks = rows.reshape(devices, -1, rows.shape[1])
    return jax.lax.all_to_all(blocks, AXIS, 0, 0, tiled=True).reshape(rows.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_rounds(static: _Static, operands: Operands, plan: ExchangePlan, rounds: jax.Array) -> jax.Array:
    return _further_rounds(static, operands, plan, rounds, _run_round(static, operands, plan, 0))


def _further_rounds(
    static: _Static, operands: Operands, plan: ExchangePlan, rounds: jax.Array, out: jax.Array
) -> jax.Array:
    def step(carry: tuple) -> tuple:
        number, out = carry
        return number + 1, out + _run_round(static, operands, plan, number)

    return jax.lax.while_loop(lambda carry: carry[0] < rounds, step, (jnp.int32(1), out))[1]


def _rounds_forward(static: _Static, operands: Operands, plan: ExchangePlan, rounds: jax.Array) -> tuple:
    out, pullback = jax.vjp(lambda operands: _run_round(static, operands, plan, 0), operands)
    return _further_rounds(static, operands, plan, rounds, out), (pullback, operands, plan, rounds)


def _rounds_backward(static: _Static, saved: tuple, gradient: jax.Array) -> tuple:
    pullback, operands, plan, rounds = saved

    def step(carry: tuple) -> tuple:
        number, sums = carry
        _, again = jax.vjp(lambda operands: _run_round(static, operands, plan, number), operands)
        return number + 1, jax.tree.map(jnp.add, sums, again(gradient)[0])

    start = jnp.int32(1), pullback(gradient)[0]
    return jax.lax.while_loop(lambda carry: carry[0] < rounds, step, start)[1], None, None


_in_rounds.defvjp(_rounds_forward, _rounds_backward)
