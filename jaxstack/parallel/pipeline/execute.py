"""Runs a pipeline schedule inside `shard_map`: loss and gradients of all microbatches, without autodiff of its loop.

A `lax.scan` goes over the ticks and reads a table made on the host, so that 8 and 64 microbatches compile in the same
time. A slot is a `lax.switch`, under `shard_map` a real conditional: a stage without a task does nothing. On a GPU each
costs a wait of the host, so there are as few as the schedule has slots, one for both ends of the model, and none within
another. Every chunk has its own branch: where a layer lies in memory is then known except for the loop's counter, and
XLA multiplies by the weights where they are instead of copying each layer's first. Permutes are outside of them (XLA's
CPU backend cannot run one in a branch that only some devices take), and are tied to what is computed meanwhile, so that
they overlap.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxstack.parallel.pipeline.layer_vjp import Layer, SplitBackward, SplitLayer, split_backward, split_layer
from jaxstack.parallel.pipeline.plan import StageLayout
from jaxstack.parallel.pipeline.schedule import RUN, WEIGHTS, Program, Schedule, make_program


@dataclasses.dataclass(frozen=True)
class StageFunctions:
    """The parts of a model that pipeline stages run, as pure functions of weights: embedding, layers, head with loss.

    `microbatch` is an int32 scalar, x the residual stream.
    """

    first: Callable[[Any, jax.Array], tuple[jax.Array, Any]]
    """(weights of the ends, microbatch) -> (x, its own sums: trees by name, as those of a layer)."""
    context: Callable[[jax.Array], Any]
    """microbatch -> the inputs that all its layers share (positions, masks, random keys)."""
    layer: Layer
    """(weights of one row, x, context, index of the layer group) -> (x, its own sums), see `Layer`."""
    last: Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
    """(weights of the ends, x, microbatch) -> (loss sum, a tree of other sums, such as the item count), all float32
    scalars."""
    is_lookup: bool = True
    """True if `first` costs almost nothing, so that all stages may run it."""
    sum_layer: Callable[[Any], Any] = lambda gradients: gradients
    """Applied to the gradients of a row's weights (None if not computed yet) before they are accumulated."""
    is_maximum: Callable[[Any], Any] = lambda weights: jax.tree.map(lambda _: False, weights)
    """Returns True for each leaf of weights whose cotangents are combined by maximum instead of sum (FP8 amax)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Totals:
    """A device's share of a step's loss, other sums and gradients (float32 trees, None in evaluation)."""

    layers: Any
    ends: Any
    loss: jax.Array
    others: Any
    own: Mapping[str, Any]
    """Sums from `first` and the layers, by name; each has terms of the loss."""


class _State(NamedTuple):
    """Carry of the loop over the ticks of a schedule: buffers for activations and gradients, and the sums so far."""

    activations: jax.Array
    gradients: jax.Array
    residuals: list[jax.Array]
    pending: list[jax.Array]
    dx: jax.Array
    totals: Totals


def execute(
    schedule: Schedule,
    layout: StageLayout,
    functions: StageFunctions,
    layers: Any,
    ends: Any,
    axis: str = "pipeline",
    *,
    unroll: bool = False,
) -> Totals:
    """Run a pipeline schedule on this device's stage, in a `shard_map`; return its part of the loss and gradients.

    The `shard_map` must be manual over `axis`.

    Args:
      layers: weights of this stage's groups of layers [chunks * most_groups, ...], in the order of `layout.order`.
      ends: weights of embedding and head, equal on all stages.
      unroll: no loop over the layers of a stage, if all stages have equally many: compiles longer, copies no weights.

    Returns the sums of this device alone: what the stages did must be added up over `axis`.
    """
    return _Executor(schedule, layout, functions, layers, ends, axis, unroll).run()


class _Executor:
    def __init__(
        self,
        schedule: Schedule,
        layout: StageLayout,
        functions: StageFunctions,
        layers: Any,
        ends: Any,
        axis: str,
        unroll: bool,
    ):
        self.schedule = schedule
        self.layout = layout
        self.functions = functions
        self.layers = layers
        self.ends = ends
        self.axis = axis
        without_loop = unroll or layout.most_groups == 1
        self.unroll = without_loop and layout.is_even and (layout.chunks == 1 or not schedule.splits_backward)
        if self.unroll:  # a buffer for each layer, made once a step
            self.layers = [jax.tree.map(lambda w, i=i: w[i], layers) for i in range(layout.chunks * layout.most_groups)]
        self.stage = lax.axis_index(axis)
        self.program: Program = make_program(schedule)
        self.trains = any(task.kind == "B" for _, _, _, task in schedule.tasks())
        self.order = jnp.asarray(layout.order)[self.stage]
        self.counts = jnp.asarray(layout.counts)[self.stage]
        size = schedule.stages
        ring = schedule.chunks > 1
        self.up = [(s, (s + 1) % size) for s in range(size if ring else size - 1)]
        self.down = [(after, before) for before, after in self.up]
        zero = jnp.zeros((), jnp.int32)
        self.x, self.own = jax.eval_shape(functions.first, ends, zero)
        self.split: SplitLayer | None = None
        self.late: SplitBackward | None = None
        if self.trains:
            row, context = jax.eval_shape(lambda: (self._row(0), functions.context(zero)))
            self.maxima = functions.is_maximum(row), functions.is_maximum(ends)
            self.split = split_layer(functions.layer, row, self.x, context, zero)
            self.own = {**self.own, **self.split.own}
            if schedule.splits_backward:
                self.late = split_backward(self.split, row, self.x, context, zero, self.maxima[0])

    def run(self) -> Totals:
        """Loop over the ticks of the schedule, and return this device's share of the loss, other sums and gradients."""
        table = {name: jnp.asarray(column)[:, self.stage] for name, column in self.program.columns.items()}
        state, _ = lax.scan(lambda state, row: (self._tick(state, row), None), self._start(), table)
        totals = state.totals
        if self.unroll and self.trains:
            totals = dataclasses.replace(totals, layers=jax.tree.map(lambda *rows: jnp.stack(rows), *totals.layers))
        return totals

    def _start(self) -> _State:
        program = self.program
        rows = self.layout.most_groups
        like = self.x

        def buffer(entries: int, *shape: int, dtype: Any = like.dtype) -> jax.Array:
            return jnp.zeros((entries, *shape), dtype)

        saved = []
        if self.split is not None:
            saved = [buffer(program.residuals, rows, *s.shape, dtype=s.dtype) for s in self.split.saved]
            host = jax.memory.Space.Host
            saved = [jax.device_put(b, host) if far else b for b, far in zip(saved, self.split.in_host, strict=True)]
        late = self.late.kept if self.late else ()
        pending = [buffer(program.weight_gradients, rows, *s.shape, dtype=s.dtype) for s in late]
        zero = jnp.zeros((), jnp.float32)

        def sums(tree):
            return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), tree)

        others = sums(jax.eval_shape(self.functions.last, self.ends, self.x, jnp.zeros((), jnp.int32))[1])
        gradients = (self._zero_sums(), sums(self.ends)) if self.trains else (None, None)
        totals = Totals(*gradients, zero, others, sums(self.own))
        return _State(
            buffer(program.activations + 1, *like.shape),
            buffer(program.gradients + 1, *like.shape),
            saved,
            pending,
            jnp.zeros(like.shape, like.dtype),
            totals,
        )

    def _zero_sums(self) -> Any:
        """Return float32 zeros to which the gradients of this stage's layers are added, microbatch by microbatch."""
        row = jax.eval_shape(lambda: self.functions.sum_layer(self._row(0)))
        if self.unroll:
            return [jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), row) for _ in self.layers]
        rows = self.layout.chunks * self.layout.most_groups
        return jax.tree.map(lambda w: jnp.zeros((rows, *w.shape), jnp.float32), row)

    def _tick(self, state: _State, row: dict[str, jax.Array]) -> _State:
        # Slot 0, while the gradients of the tick before travel down.
        arriving = lax.ppermute(state.dx, self.axis, self.down) if self.trains else None
        y, state = self._forward_slot(state, row)
        if arriving is not None:
            arriving, y = lax.optimization_barrier((arriving, y))
            state = state._replace(gradients=_put(state.gradients, arriving, row["arriving_gradient"]))
        # Slot 1 and those after it, while this tick's activations travel up.
        arriving = lax.ppermute(y, self.axis, self.up)
        state = self._ends_slot(state, y, row)
        if self.trains:
            state = self._backward_slot(state, row)
            if self.late is not None:
                state = self._weights_slot(state, row)
            arriving, dx = lax.optimization_barrier((arriving, state.dx))
            state = state._replace(dx=dx)
        return state._replace(activations=_put(state.activations, arriving, row["arriving"]))

    def _by_chunk(self, run: Callable[..., Any]) -> list[Callable[..., Any]]:
        """Return `run` bound to each of this device's virtual stages in turn, as branches of a `lax.switch`."""
        return [functools.partial(run, chunk) for chunk in range(self.layout.chunks)]

    def _forward_slot(self, state: _State, row: dict[str, jax.Array]) -> tuple[jax.Array, _State]:
        # A branch gets and returns what it changes alone: XLA would copy buffers that merely pass through.
        microbatch = row["microbatch0"]
        start = state.totals.own
        nothing = jnp.zeros(self.x.shape, self.x.dtype)

        def idle(residuals: Any, total: Any) -> Any:
            return nothing, residuals, total, start

        def forward(chunk: int, residuals: Any, total: Any) -> Any:
            x, own = self._entering(state.activations, start, row)
            x, residuals, own = self._forward(residuals, x, own, microbatch, chunk, row["residual0"])
            return x, residuals, total, own

        def weights(residuals: Any, total: Any) -> Any:
            return nothing, residuals, self._weights(total, state.pending, row["chunk0"], row["pending0"]), start

        late = self.late is not None
        changed = state.residuals, state.totals.layers if late else None
        branches = [idle, *self._by_chunk(forward), *([weights] if late else [])]
        branch = jnp.where(row["slot0"] == RUN, RUN + row["chunk0"], (row["slot0"] == WEIGHTS) * (len(branches) - 1))
        y, residuals, total, own = lax.switch(branch, branches, *changed)
        totals = dataclasses.replace(state.totals, own=own, **({"layers": total} if late else {}))
        return y, state._replace(residuals=residuals, totals=totals)

    def _entering(self, activations: jax.Array, total: Any, row: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        """Return (input of a virtual stage's layers: embedded tokens or received activations; updated own sums)."""
        functions = self.functions

        def first() -> tuple[jax.Array, Any]:
            x, own = functions.first(self.ends, row["microbatch0"])
            return x, _added(total, own)

        def received() -> tuple[jax.Array, Any]:
            return _take(activations, row["activation"]), total

        if not functions.is_lookup:
            return lax.cond(row["first"] == 1, first, received)
        # Every stage looks the tokens up: that is cheaper than another conditional.
        return jnp.where(row["first"] == 1, first()[0], received()[0]), total

    def _forward(
        self, residuals: Any, x: jax.Array, total: Any, microbatch: jax.Array, chunk: int, entry: jax.Array
    ) -> tuple[jax.Array, Any, Any]:
        context = self.functions.context(microbatch)

        def step(i: Any, carry: Any) -> Any:
            x, residuals, total = carry
            place = self._place(chunk, i)
            weights = self._row(place)
            index = self.order[place]
            if self.split is None:
                x, own = self.functions.layer(weights, x, context, index)
            else:
                x, own, saved = self.split.forward(weights, x, context, index)
                residuals = [_put_row(b, s, entry, i) for b, s in zip(residuals, saved, strict=True)]
            return x, residuals, _added(total, own)

        return self._for_rows(chunk, step, (x, residuals, total))

    def _ends_slot(self, state: _State, y: jax.Array, row: dict[str, jax.Array]) -> _State:
        """Compute the loss and its gradient on the last virtual stage, the embedding's gradient on the first."""
        functions = self.functions
        microbatch = row["ends_microbatch"]
        totals = state.totals

        def add(total: Any, gradients: Any) -> Any:
            return jax.tree.map(_combined, total, gradients, self.maxima[1])

        def nothing(arrived: Any, total: Any) -> Any:
            return arrived, total, totals.loss, totals.others

        def head(arrived: Any, total: Any) -> Any:
            if not self.trains:
                loss, others = functions.last(self.ends, y, microbatch)
            else:
                objective = jax.value_and_grad(lambda ends, y: functions.last(ends, y, microbatch), (0, 1), True)
                (loss, others), (gradients, dy) = objective(self.ends, y)
                arrived = _put(arrived, dy.astype(y.dtype), row["ends_gradient"])
                total = add(total, gradients)
            return arrived, total, totals.loss + loss, jax.tree.map(jnp.add, totals.others, others)

        def embedding(arrived: Any, total: Any) -> Any:
            (_, own), pullback = jax.vjp(lambda ends: functions.first(ends, microbatch), self.ends)
            (gradients,) = pullback((state.dx, jax.tree.map(jnp.ones_like, own)))
            return arrived, add(total, gradients), totals.loss, totals.others

        branches = [nothing, head, *([embedding] if self.trains else [])]
        arrived, total, loss, others = lax.switch(row["ends"], branches, state.gradients, totals.ends)
        totals = dataclasses.replace(totals, ends=total, loss=loss, others=others)
        return state._replace(gradients=arrived, totals=totals)

    def _backward_slot(self, state: _State, row: dict[str, jax.Array]) -> _State:
        entry = row["residual1"]
        late = row["pending1"]

        def idle(dx: jax.Array, total: Any, pending: Any) -> Any:
            return dx, total, pending

        def backward(chunk: int, dx: jax.Array, total: Any, pending: Any) -> Any:
            context = self.functions.context(row["microbatch1"])
            count = self._count(chunk)

            def step(done: Any, carry: Any) -> Any:
                dx, total, pending = carry
                i = count - 1 - done
                place = self._place(chunk, i)
                saved = [_take_row(b, entry, i) for b in state.residuals]
                inputs = (saved, dx, self._row(place), context, self.order[place])
                if self.late is None:
                    assert self.split is not None
                    dx, found = self.split.backward(*inputs)
                    return dx, self._add_row(total, found, place), pending
                dx, found, kept = self.late.backward(*inputs)
                pending = [_put_row(b, k, late, i) for b, k in zip(pending, kept, strict=True)]
                return dx, self._add_row(total, found, place), pending

            return self._for_rows(chunk, step, (_take(state.gradients, row["gradient"]), total, pending))

        changed = state.dx, state.totals.layers, state.pending
        branch = (row["slot1"] == RUN) * (1 + row["chunk1"])
        dx, total, pending = lax.switch(branch, [idle, *self._by_chunk(backward)], *changed)
        return state._replace(dx=dx, pending=pending, totals=dataclasses.replace(state.totals, layers=total))

    def _weights_slot(self, state: _State, row: dict[str, jax.Array]) -> _State:
        """Run the deferred weight-gradient tasks in a tick's last two time slots; add their gradients to the totals.

        Those of slot 1 have no branch in its own switch: its branches pass on the values that they read, so XLA would
        copy these.
        """
        of_slot_1 = row["slot1"] == WEIGHTS
        of_slot_2 = row["slot2"] == WEIGHTS
        first, second = ((row[f"chunk{slot}"], row[f"pending{slot}"]) for slot in (1, 2))
        only = [jnp.where(of_slot_1, a, b) for a, b in zip(first, second, strict=True)]

        def add(total, place):
            return self._weights(total, state.pending, *place)

        branches = [lambda total: total, lambda total: add(total, only), lambda total: add(add(total, first), second)]
        total = lax.switch(of_slot_1.astype(jnp.int32) + of_slot_2, branches, state.totals.layers)
        return state._replace(totals=dataclasses.replace(state.totals, layers=total))

    def _weights(self, total: Any, pending: list[jax.Array], chunk: jax.Array, entry: jax.Array) -> Any:
        """Compute the weight gradients that an earlier backward pass deferred, and add them to the totals."""
        late = self.late
        assert late is not None

        def step(i: Any, total: Any) -> Any:
            kept = [_take_row(b, entry, i) for b in pending]
            return self._add_row(total, late.weights(kept), self._place(chunk, i))

        return self._for_rows(chunk, step, total)

    def _for_rows(self, chunk: Any, step: Callable[[Any, Any], Any], start: Any) -> Any:
        if self.layout.most_groups == 1 or self.unroll:
            for i in range(self.layout.most_groups):
                start = step(i, start)
            return start
        # A number of layers that differs from stage to stage costs the loop on a GPU a look at it each time.
        return lax.fori_loop(0, self._count(chunk), step, start)

    def _count(self, chunk: Any) -> Any:
        return self.layout.most_groups if self.layout.is_even else self.counts[chunk]

    def _place(self, chunk: Any, i: Any) -> Any:
        return i if self.layout.chunks == 1 else chunk * self.layout.most_groups + i

    def _row(self, place: Any) -> Any:
        if self.unroll:
            return self.layers[place]
        # Sliced a row at a time: taking a whole chunk first would copy its weights.
        return jax.tree.map(lambda w: _take(w, place), self.layers)

    def _add_row(self, totals: Any, found: Any, place: Any) -> Any:
        """Add one layer group's gradients to this stage's totals, except those not computed yet (None)."""
        found = self.functions.sum_layer(found)
        if self.unroll:
            changed = jax.tree.map(_combined, totals[place], found, self.maxima[0])
            return [*totals[:place], changed, *totals[place + 1 :]]

        def add(total: jax.Array, g: jax.Array | None, maximum: bool) -> jax.Array:
            if g is None:
                return total
            # A scatter is one kernel in place; a slice, a sum and an update copy the row to memory in between.
            put = total.at[place].max if maximum else total.at[place].add
            return put(g.astype(total.dtype), mode="promise_in_bounds", unique_indices=True, indices_are_sorted=True)

        return jax.tree.map(add, totals, found, self.maxima[0])


def _added(total: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add sums by name to totals, which have all names."""
    return {name: jax.tree.map(jnp.add, x, own[name]) if name in own else x for name, x in total.items()}


def _combined(total: jax.Array, g: jax.Array | None, maximum: bool) -> jax.Array:
    if g is None:
        return total
    return jnp.maximum(total, g) if maximum else total + g.astype(total.dtype)


def _take(buffer: jax.Array, entry: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(buffer, entry, 0, keepdims=False)


def _put(buffer: jax.Array, value: jax.Array, entry: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(buffer, value, entry, 0)


def _take_row(buffer: jax.Array, entry: jax.Array, row: jax.Array) -> jax.Array:
    shape = (1, 1, *buffer.shape[2:])
    return lax.dynamic_slice(buffer, (entry, row, *(0,) * (buffer.ndim - 2)), shape).reshape(shape[2:])


def _put_row(buffer: jax.Array, value: jax.Array, entry: jax.Array, row: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(buffer, value[None, None], (entry, row, *(0,) * value.ndim))
