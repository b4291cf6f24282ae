"""Experts on several devices: tokens travel to the devices of their experts and their results travel back.

Each pair of devices has a buffer of `slots` rows, which `lax.all_to_all` exchanges. What does not fit goes in further
rounds, as many as the fullest pair needs, so no imbalance drops a token, and memory is that of a round: rows for
`exchange_factor` times an even load. The first round is differentiated as it is; the others, which are seldom any,
compute their forward again in the backward pass.

Dims: n devices, C slots, t tokens, k experts a token, N = t k assignments, E experts, G = E / n of a device, D model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.models.moe.dispatch import Order, Rows, arrange, sort_by_group, sum_rows, take_rows, take_weights
from pallas_kernels import grouped_matmul_alignment

Compute = Callable[[jax.Array, jax.Array, Any, jax.Array, int], jax.Array]
"""(rows [R, D], their weights [R], kernels, sizes of the groups [G], their alignment) -> [R, D], already weighted.

Weighted there and not where the results are summed, the backward pass needs no result again: one exchange and one
matmul less where it recomputes."""

AXIS = "expert"
_ROUND = 8


def compute_here(compute: Compute, x: jax.Array, experts: jax.Array, weights: jax.Array, kernels: Any) -> jax.Array:
    """All experts on this device: x [t, D], experts int32 [t, k] (beyond the last: dropped), weights [t, k]."""
    count = jax.tree.leaves(kernels)[0].shape[0]
    alignment = grouped_matmul_alignment(experts.size, count)
    rows, sizes = arrange(experts, count, alignment)
    return sum_rows(compute(take_rows(x, rows), take_weights(weights, rows), kernels, sizes, alignment), rows)


def slots_of(assignments: int, devices: int, factor: float, most: int) -> int:
    """Rows of a pair's buffer: `factor` times an even load of `assignments`, but no more than `most` can be sent."""
    wanted = -int(-assignments * factor // devices)
    return min(-(-wanted // _ROUND) * _ROUND, most)


class Plan(NamedTuple):
    """Who sends what to whom."""

    experts: jax.Array
    """[t, k] int32."""
    order: Order
    """Of the assignments by expert, and so by device."""
    arriving: jax.Array
    """[n, G] int32: rows that each device sends to each expert of this one."""


class _Static(NamedTuple):
    compute: Compute
    devices: int
    slots: int


def compute_apart(
    compute: Compute,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    kernels: Any,
    *,
    devices: int,
    factor: float,
    most: int | None = None,
) -> jax.Array:
    """As `compute_here`, where each device of the axis `expert` holds its part of the kernels, in order.

    Args:
      factor: rows of a round as a multiple of an even load.
      most: rows that one device can send to another at most; left out: all its assignments.
    """
    local = jax.tree.leaves(kernels)[0].shape[0]
    flat = experts.reshape(-1)
    most = min(flat.shape[0], most or flat.shape[0])
    slots = slots_of(flat.shape[0], devices, factor, most)
    order = sort_by_group(flat, devices * local)
    counts = (order.first[1:] - order.first[:-1]).reshape(devices, local)
    plan = Plan(experts, order, jax.lax.all_to_all(counts, AXIS, 0, 0, tiled=True))
    static = _Static(compute, devices, slots)
    operands = (x, weights, kernels)
    if slots >= most:
        return _run_round(static, operands, plan, 0)
    fullest = jax.lax.pmax(counts.sum(axis=1).max(), AXIS)
    return _in_rounds(static, operands, plan, (fullest + slots - 1) // slots)


def _run_round(static: _Static, operands: tuple, plan: Plan, number: Any) -> jax.Array:
    """What the rows of one round add to the result [t, D]."""
    x, weights, kernels = operands
    devices, slots = static.devices, static.slots
    rows = _sent_rows(static, plan, number)
    received = _all_to_all(take_rows(x, rows), devices)
    weights = _all_to_all(take_weights(weights, rows)[:, None], devices)
    local = plan.arriving.shape[1]
    slot = jnp.arange(slots, dtype=jnp.int32) + number * slots
    ends = jnp.cumsum(plan.arriving, axis=1)
    groups = (slot[None, :, None] >= ends[:, None, :]).sum(axis=-1, dtype=jnp.int32).reshape(-1, 1)
    alignment = grouped_matmul_alignment(devices * slots, local)
    here, sizes = arrange(groups, local, alignment)
    results = static.compute(take_rows(received, here), take_weights(weights, here), kernels, sizes, alignment)
    return sum_rows(_all_to_all(sum_rows(results, here), devices), rows)


def _sent_rows(static: _Static, plan: Plan, number: Any) -> Rows:
    """The send buffer [n C] of a round: of the assignments to each device, those of this round, sorted by expert."""
    devices, slots = static.devices, static.slots
    local = plan.arriving.shape[1]
    first = plan.order.first[::local]
    offset = jnp.arange(slots, dtype=jnp.int32) + number * slots
    there = offset < (first[1:] - first[:-1])[:, None]
    index = first[:-1, None] + offset
    assignments = plan.experts.size
    source = jnp.where(there, plan.order.order.at[index].get(mode="clip"), assignments).reshape(-1)
    device = plan.experts // local
    slot = plan.order.position.reshape(device.shape) - first.at[device].get(mode="clip") - number * slots
    inside = (slot >= 0) & (slot < slots) & (device < devices)
    return Rows(source, jnp.where(inside, device * slots + slot, devices * slots))


def _all_to_all(rows: jax.Array, devices: int) -> jax.Array:
    blocks = rows.reshape(devices, -1, rows.shape[1])
    return jax.lax.all_to_all(blocks, AXIS, 0, 0, tiled=True).reshape(rows.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_rounds(static: _Static, operands: tuple, plan: Plan, rounds: jax.Array) -> jax.Array:
    return _further_rounds(static, operands, plan, rounds, _run_round(static, operands, plan, 0))


def _further_rounds(static: _Static, operands: tuple, plan: Plan, rounds: jax.Array, out: jax.Array) -> jax.Array:
    def step(carry: tuple) -> tuple:
        number, out = carry
        return number + 1, out + _run_round(static, operands, plan, number)

    return jax.lax.while_loop(lambda carry: carry[0] < rounds, step, (jnp.int32(1), out))[1]


def _rounds_forward(static: _Static, operands: tuple, plan: Plan, rounds: jax.Array) -> tuple:
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
