"""Load balancing for the programs of the Hopper attention kernels, by simulation while tracing.

Under a causal mask blocks differ in work, and the program with the most work determines the kernel's time.
"""

import functools
import heapq

import numpy as np

from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.mosaic_config import KernelConfig, Tail
from pallas_kernels.attention.visible_tiles import visible_tiles
from pallas_kernels.hopper.wgmma import ROWS

_START_TILES = 3
"""Time in which a program loads its keys and stores its results, in units of a tile of 64 queries by 128 keys."""
_COPIED_BYTES = 106_000
"""Bytes that an H200 copies in the time of such a tile, divided by the head dim.

The time of a tile is proportional to the head dim: 5 products at 3 TFLOP/s per multiprocessor. Copies run at 4 TB/s.
"""
_START_VISITS = 0.7
"""Time in which the forward loads a block of queries and stores its results, in units of a visit of a key block."""
_TALLER_VISIT = 1.35
"""Time of a visit with three warpgroups, in visits with two.

Fitted to ten shapes of head dim 64 on an H200: the faster of the two is found for all of them but one, where they are
within 2 %.
"""
_LEAST_GAIN = 1.01
"""Ratio of simulated times above which alternating rounds, or a division of the last key blocks, are used."""


def alternation_helps(config: KernelConfig, sequences: int) -> bool:
    """Return whether the forward's programs finish earlier if every second round of blocks is dealt in reverse order.

    Args:
        config: Static description of the forward kernel, which deals out blocks of queries from the last to the first.
        sequences: Batch size times query heads, B * N.

    Returns:
        True if the simulated time falls by more than 1 %.
    """
    in_turn, alternating = _forward_times(config, sequences)
    return in_turn > _LEAST_GAIN * alternating


def choose_tail(config: KernelConfig, k_shape: tuple[int, ...]) -> Tail | None:
    """Choose how the fused backward of full attention divides its last key blocks among otherwise idle multiprocessors.

    All programs of full attention take equally long, so that the last round can leave most multiprocessors idle: of 136
    programs on 132 multiprocessors, the last 4 take as long as the first 132. Dividing blocks has a cost: each part
    writes its gradients in float32, to be read and summed afterwards.

    Args:
        config: Static description of the kernel, of a call without segments.
        k_shape: [B, S, K, H].

    Returns:
        The division with the shortest simulated time; None if it saves less than 1 %, if attention is not full, or if
        `config.head_parts` is more than 1.
    """
    batch, key_length, heads, _ = k_shape
    if config.options.mask != Mask(causal=False) or config.head_parts > 1:
        return None
    rows = batch * -(-key_length // config.key_block)
    visits = -(-config.length // config.query_block) * config.query_block * config.key_block / (ROWS * 128)

    def time(tail: Tail) -> float:
        whole, left = divmod((rows - tail.blocks) * heads, config.programs)
        loads = [(whole + (program < left)) * (visits + _START_TILES) for program in range(config.programs)]
        heapq.heapify(loads)
        for _ in range(tail.blocks * heads * tail.parts):
            heapq.heapreplace(loads, loads[0] + visits / tail.parts + _START_TILES)
        # dK and dV of each part are written and read in float32.
        return max(loads) + 2 * 2 * 4 * tail.parts * tail.blocks * config.key_block * heads / _COPIED_BYTES

    most = min(-(-key_length // config.key_block), config.programs // heads + 1)
    tails = [Tail(blocks, parts) for blocks in range(1, most + 1) for parts in (2, 3, 4, 6, 8)]
    best = min(tails, key=time)
    return best if time(Tail(0, 1)) > _LEAST_GAIN * time(best) else None


def fewer_warpgroups_help(config: KernelConfig, fewer: KernelConfig, sequences: int) -> bool:
    """Return whether the forward ends earlier with two computing warpgroups than with three.

    Three give the tensor cores more work at a time. But their blocks of 192 queries contain more masked scores, and
    there are fewer blocks to divide among the multiprocessors.

    Args:
        config: Static description of the forward kernel with three computing warpgroups.
        fewer: That of the same kernel with two.
        sequences: Batch size times query heads, B * N.
    """

    def time(of: KernelConfig) -> float:
        in_turn, alternating = _forward_times(of, sequences)
        return alternating if in_turn > _LEAST_GAIN * alternating else in_turn

    return time(fewer) < _TALLER_VISIT * time(config)


@functools.lru_cache(maxsize=256)
def _forward_times(config: KernelConfig, sequences: int) -> tuple[float, float]:
    """Return the forward's simulated times, in visits of a key block: without alternating rounds, and with them.

    Blocks of queries are dealt out to the programs from the last to the first.
    """
    some, _ = visible_tiles(config.options.mask, config.blocks, None)
    costs = np.repeat(np.asarray(some[0]).sum(axis=1)[::-1] + _START_VISITS, sequences)
    rounds = np.pad(costs, (0, -costs.size % config.programs)).reshape(-1, config.programs)
    in_turn = float(rounds.sum(axis=0).max())
    rounds[1::2] = rounds[1::2, ::-1]
    return in_turn, float(rounds.sum(axis=0).max())


def choose_head_parts(config: KernelConfig, num_heads: int, k_shape: tuple[int, ...]) -> int:
    """Choose among how many programs to divide the query heads of each key head in the fused backward.

    With few key heads there are few programs, and at the end most multiprocessors wait for the last ones. More
    programs share the work more evenly, but their float32 results must be summed.

    Args:
        config: Static description of the kernel.
        num_heads: N.
        k_shape: [B, S, K, H].

    Returns:
        The divisor of N / K with the shortest time, in a simulation in which each program goes to the multiprocessor
        that is free first; 1 if that saves less than 1 %, since the parts' results take memory (long sequences have
        programs enough, but their results are as long).
    """
    batch, key_length, kv_heads, _ = k_shape
    group = num_heads // kv_heads
    if group == 1:
        return 1
    some, _ = visible_tiles(config.options.mask, config.blocks, None)
    visits = np.asarray(some[0]).sum(axis=0)
    tiles_in_a_visit = config.query_block * config.key_block / (ROWS * 128)

    def tiles(parts: int) -> float:
        costs = np.repeat(visits * (group // parts) * tiles_in_a_visit + _START_TILES, kv_heads * parts)
        loads = [0.0] * config.programs
        for cost in np.tile(costs, batch).tolist():
            heapq.heapreplace(loads, loads[0] + cost)
        # dK and dV are written and read in float32.
        copied = 2 * 2 * 4 * parts * batch * key_length * kv_heads if parts > 1 else 0
        return max(loads) + copied / _COPIED_BYTES

    best = min((parts for parts in range(1, group + 1) if group % parts == 0), key=tiles)
    return best if tiles(1) > _LEAST_GAIN * tiles(best) else 1
