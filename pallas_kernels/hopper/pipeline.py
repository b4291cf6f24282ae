"""The warp-specialised loop of all Hopper kernels: one warpgroup loads data, the others compute.

The producer warpgroup copies operands from global memory by TMA into a ring of shared-memory buffers, as far ahead as
the ring has stages. The consumer warpgroups multiply what is in the buffers. Two barriers for each buffer keep both in
step: `full`, at which the copies arrive, and `empty`, at which every consumer arrives when it has read the buffer.

`launch` starts such a kernel, `specialize` divides the warpgroups, `Ring.produce` is the producer's loop and
`Ring.sum_products` a consumer's. A consumer that does more to a buffer than multiply it (the softmax of attention, the
scales of blockwise FP8) waits at `full` itself and ends with `Ring.release`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu, speed_up_lowering

_CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
"""Registers of each thread of a consumer, by the number of consumers; a multiprocessor has 64 Ki registers."""
_PRODUCER_REGISTERS = {1: 40, 2: 24, 3: 32}


def launch(
    name: str,
    body: Callable[..., None],
    *,
    consumers: int,
    programs: int | None = None,
    cluster: int = 1,
    interpret: bool,
    **parameters: Any,
) -> Callable[..., Any]:
    """Build a launchable Hopper kernel with one loading warpgroup and `consumers` computing ones.

    Args:
        name: Name of the kernel, which a profile shows.
        body: Kernel body, run by every warpgroup.
        consumers: Number of consumer warpgroups.
        programs: Number of programs of a persistent kernel, on the grid axis `program`; None if `parameters` hold
            another grid.
        cluster: Number of programs of a cluster. If it is more than 1, the axis `cluster` numbers them, and the axis
            `program` numbers clusters.
        interpret: True to interpret the kernel on a CPU, with detection of races.
        parameters: Further arguments of `plgpu.kernel`.
    """
    if not interpret:
        speed_up_lowering()
    if programs is not None:
        parameters |= {"grid": (programs // cluster,), "grid_names": ("program",)}
    if cluster > 1:
        parameters |= {"cluster": (cluster,), "cluster_names": ("cluster",)}
    return plgpu.kernel(
        body,
        kernel_name=name,
        num_threads=consumers + 1,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        **parameters,
    )


def empty_barriers(arrivals: int, stages: int, cluster: int) -> Any:
    """Return the barriers, for a kernel's `scratch_types`, at which consumers arrive when they have read a buffer.

    In a cluster a copy writes the buffers of all programs, so it waits for the consumers of all programs.

    Args:
        arrivals: Number of consumers of one program that read a buffer.
        stages: Number of buffers.
        cluster: Number of programs of a cluster.
    """
    if cluster == 1:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    return plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=arrivals, num_barriers=stages)


def specialize(warpgroup: jax.Array, consumers: int, consume: Callable[[], None], produce: Callable[[], None]) -> None:
    """Run `consume` in the computing warpgroups and `produce` in the loading one, with registers divided accordingly.

    Args:
        warpgroup: Number of this warpgroup, `lax.axis_index("warpgroup")`.
        consumers: Number of consumer warpgroups.
        consume: A consumer's part of the kernel.
        produce: The producer's part.
    """

    @pl.when(warpgroup < consumers)
    def _():
        plgpu.set_max_registers(_CONSUMER_REGISTERS[consumers], action="increase")
        consume()

    @pl.when(warpgroup == consumers)
    def _():
        plgpu.set_max_registers(_PRODUCER_REGISTERS[consumers], action="decrease")
        produce()


@dataclass(frozen=True)
class Ring:
    """Circular buffer of `stages` slots in shared memory, filled by the loading warpgroup, read by the computing ones.

    The `count`-th load of a program goes to buffer count % stages.
    """

    stages: int
    interpret: bool = False

    def slot(self, count: Index) -> jax.Array:
        """Return the index of the shared-memory buffer that the `count`-th load goes to."""
        return lax.rem(count, self.stages)

    def acquire(self, count: Index, *empty: Ref) -> None:
        """Wait in the loading warpgroup, on each barrier in `empty`, until the `count`-th load's buffer is free."""
        slot = self.slot(count)

        @pl.when(count >= self.stages)
        def _():
            for barriers in empty:
                plgpu.barrier_wait(barriers.at[slot])

    def release(self, slot: Index, *empty: Ref) -> None:
        """Tell the loading warpgroup that this warpgroup has finished reading a buffer.

        Its products have ended by then. So hardware needs no fence before TMA writes the buffer again; interpret mode
        asks for one.
        """
        for barriers in empty:
            if self.interpret:
                plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.at[slot])

    def produce(self, before: Index, count: Index, load: Callable[[Index, Index, Callable[..., None]], None]) -> None:
        """Run the loop of the loading warpgroup: fill `count` buffers by calls of `load`, which wait for free ones.

        Args:
            before: Number of loads of this program until now.
            count: Number of loads.
            load: Called as load(index, slot, acquire) to copy the `index`-th load to buffer `slot`; it calls
                acquire(*empty) before it starts the copies.
        """

        def step(index: jax.Array, _: None) -> None:
            total = before + index
            load(index, self.slot(total), lambda *empty: self.acquire(total, *empty))

        lax.fori_loop(0, count, step, None)

    def drain(self, count: Index, *empty: Ref) -> None:
        """Wait, in the loading warpgroup and after its `count` loads, until the consumers have read all buffers.

        No barrier may be left in a phase that nobody has waited for.
        """

        def wait(index: jax.Array, _: None) -> None:
            for barriers in empty:
                plgpu.barrier_wait(barriers.at[self.slot(index)])

        lax.fori_loop(jnp.maximum(count - self.stages, 0), count, wait, None)

    def sum_products(
        self,
        before: Index,
        count: Index,
        shape: tuple[int, int],
        barriers: tuple[Callable[[Index], Ref], Ref],
        operands: Callable[[Index], tuple[Ref, Ref]],
    ) -> jax.Array:
        """Return the float32 sum of the products of `count` loaded pairs of operands: a computing warpgroup's loop.

        One product is always running while the next one is started; a buffer is released when its product has ended.

        Args:
            before: Number of loads of this program until now.
            count: Number of loads to sum.
            shape: [rows, columns] of the sum, rows of this warpgroup.
            barriers: The barrier at which a buffer's operands arrive, by its slot, and the ring's `empty` barriers.
            operands: Returns this warpgroup's left and right operand in a buffer.
        """
        full, empty = barriers

        def scoped(accumulator: Ref) -> jax.Array:
            def step(index: jax.Array, _: None) -> None:
                slot = self.slot(before + index)
                plgpu.barrier_wait(full(slot))
                plgpu.wgmma(accumulator, *operands(slot))
                plgpu.wgmma_wait(1)

                @pl.when(index > 0)
                def _():
                    self.release(self.slot(before + index - 1), empty)

            lax.fori_loop(0, count, step, None)
            plgpu.wgmma_wait(0)
            pl.when(count > 0)(lambda: self.release(self.slot(before + count - 1), empty))
            return accumulator[...]

        return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32))
