"""The layers of a Transformer: stacked along a leading `layers` dim and run by a scan, or unrolled.

Layers whose records alternate (mixers, windows, experts) are scanned in groups: a pattern of p records is p stacks that
one scan runs together. Layers before the pattern and after its last whole repetition are unrolled.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Key

from jaxstack.models.adapters import set_adapter_dropout_keys
from jaxstack.models.block import Block
from jaxstack.models.config import ModelConfig
from jaxstack.models.dropout import fold_key
from jaxstack.models.layer import Beside, Context, Layer, LayerCache
from jaxstack.models.layer_sums import LayerSums, Sums, add_sums
from jaxstack.models.layer_weights import (
    Weights,
    add_layers_logical_axis,
    gather_layers,
    gather_weights,
    remove_layers_logical_axis,
    run_prefetched,
)
from jaxstack.models.moe.router import ROUTER, RouterSums
from jaxstack.models.remat import OFFLOADED, name_layer_input, rematerialise
from jaxstack.parallel import gathers_ahead

Caches = list[LayerCache] | None
"""Caches in the order of `Stack.layers`: of a single layer, or of a stack with a leading dim of layers."""

LayerOutput = tuple[jax.Array, LayerCache | None, LayerSums]
"""(x [B, T, D], cache, the layer's sums over tokens) after one layer."""

RunLayer = Callable[[jax.Array, Weights, LayerCache | None, jax.Array | None, Beside], LayerOutput]
"""(x, weights, cache, dropout key, what the layer reads beside x) -> output of one layer."""


def make_stacked_blocks(make: Callable[[nnx.Rngs], Block], keys: Key[Array, " layers"]) -> Block:
    """Initialize one layer per key, stacked into one `Block` whose parameters have a leading dim of layers.

    The weights are drawn in a loop: unrolled, the initialization takes longer to compile than the training step.
    """
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    state = jax.lax.map(lambda key: nnx.state(make(nnx.Rngs(key))), keys)
    return nnx.merge(graphdef, add_layers_logical_axis(state))


def unstack_block(stacked: Block, index: int) -> Block:
    """Extract one layer from a `Block` that stacks several."""
    graphdef, state = nnx.split(stacked)
    return nnx.merge(graphdef, remove_layers_logical_axis(jax.tree.map(lambda x: x[index], state)))


class Stack(nnx.Module):
    """All layers of a Transformer, of which some are stacked and run by a scan.

    Attributes:
      layers: blocks; those of the indices `scanned` have parameters with a leading dim of `repeats` layers.
      start, period, repeats: with `config.scan_layers`, the model's layers from `start` on are `repeats` repetitions of
        a pattern of `period` layers. All other layers are single.
      count: number of the model's layers.
      scanned: indices in `layers` of the stacks that the scan runs; empty if all layers are single.
      remat: value of `ModelConfig.remat`.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        kinds = config.layers()
        self.start, self.period = config.layer_pattern if config.scan_layers else (0, len(kinds))
        self.repeats = (len(kinds) - config.end_layers - self.start) // self.period if config.scan_layers else 1
        if self.repeats == 1:
            self.start = 0
            self.period = len(kinds)
        self.scanned = range(self.start, self.start + self.period) if self.repeats > 1 else range(0)
        self.count = len(kinds)
        keys = jax.random.split(rngs.params(), len(kinds))
        blocks = {}
        for index in self.scanned:
            numbers = jnp.array(self.layer_numbers(index))
            blocks[index] = make_stacked_blocks(_block_maker(config, kinds[index]), keys[numbers])
        count = len(kinds) - self.period * (self.repeats - 1)
        single = {index: self.layer_numbers(index)[0] for index in range(count) if index not in self.scanned}
        for kind in dict.fromkeys(kinds[number] for number in single.values()):
            alike = [(index, number) for index, number in single.items() if kinds[number] == kind]
            stacked = make_stacked_blocks(_block_maker(config, kind), keys[jnp.array([number for _, number in alike])])
            blocks |= {index: unstack_block(stacked, row) for row, (index, _) in enumerate(alike)}
        self.layers = nnx.List([blocks[index] for index in sorted(blocks)])
        for p in jax.tree.leaves(nnx.state(self.layers, nnx.Param), is_leaf=lambda p: isinstance(p, nnx.Variable)):
            p.set_metadata(sum_where_used=True)  # each of them passes `gather_weights` once
        self.remat = config.remat

    def layer_numbers(self, index: int) -> range:
        """Return the positions in the model, from 0, of the layers in `layers[index]`; a stack has several layers."""
        if index in self.scanned:
            return range(index, self.start + self.period * self.repeats, self.period)
        number = index if index < self.start + self.period else index + self.period * (self.repeats - 1)
        return range(number, number + 1)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        caches: Caches,
        key: Key[Array, "..."] | None,
        dtype: jax.typing.DTypeLike,
    ) -> tuple[Float[Array, "B T D"], Caches, LayerSums]:
        """Run all layers, each with its weights all-gathered and cast to `dtype` only where they are used.

        Returns:
          x, the caches, and the sums over tokens of all layers.
        """
        x, new_caches, sums, beside = self._run_single(range(self.scanned.start), x, context, caches, key, dtype)
        context = context._replace(beside=beside)
        if self.scanned:
            x, found, scan_sums = self._scan(x, context, caches, key, dtype)
            new_caches = new_caches + found
            sums = add_sums(sums, scan_sums)
        x, found, last_sums = self.run_after_scan(x, context, caches, key, dtype)
        return x, [*new_caches, *found] if caches else None, add_sums(sums, last_sums)

    def run_before_scan(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        caches: Caches,
        key: Key[Array, "..."] | None,
        dtype: jax.typing.DTypeLike,
    ) -> tuple[Float[Array, "B T D"], list[LayerCache], LayerSums]:
        """Run the unstacked layers before the scan; return x, their caches and sums."""
        return self._run_single(range(self.scanned.start), x, context, caches, key, dtype)[:3]

    def run_after_scan(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        caches: Caches,
        key: Key[Array, "..."] | None,
        dtype: jax.typing.DTypeLike,
    ) -> tuple[Float[Array, "B T D"], list[LayerCache], LayerSums]:
        """Run the unstacked layers after the scan; return x, their caches and sums."""
        return self._run_single(range(self.scanned.stop, len(self.layers)), x, context, caches, key, dtype)[:3]

    def run_repetition(
        self,
        x: Float[Array, "B T D"],
        weights: Sequence[Weights],
        context: Context,
        caches: Caches,
        key: Key[Array, "..."] | None,
        step: int | jax.Array,
    ) -> tuple[Float[Array, "B T D"], tuple[list[LayerCache], list[LayerSums]]]:
        """Run the layers of one repetition of the model's layer pattern, which is one iteration of the scan.

        Args:
          weights: gathered weights of the pattern's layers, from `gather_layers`.
          context: with `beside.inputs` of these layers only.
          step: number of the repetition.

        Returns:
          x, and the layers' caches and sums.
        """
        new_caches = []
        sums = []
        for i, state in enumerate(weights):
            number = self.start + step * self.period + i
            run = _layer_runner(nnx.graphdef(self.layers[self.start + i]), context)
            cache = caches[i] if caches else None
            x, cache, own = run(x, state, cache, fold_key(key, number), context.beside.of_layer(number, i))
            new_caches.append(cache)
            sums.append(_recorded(own, context))
        return x, (new_caches, sums)

    def sums_of_repetition(self, sums: Sequence[LayerSums], step: int | jax.Array) -> LayerSums:
        """Return the sums over tokens of all layers, where only those of one repetition [period] ran."""
        return self._of_layers(sums, self.start + step * self.period + jnp.arange(self.period))

    def _of_layers(self, sums: Sequence[LayerSums], numbers: jax.typing.ArrayLike) -> LayerSums:
        """Return the sums of all layers, given those of the layers `numbers`, each of which may be several."""
        names = dict.fromkeys(name for own in sums for name in own)
        return {name: self._of_layers_with(name, sums, jnp.asarray(numbers)) for name in names}

    def _of_layers_with(self, name: str, sums: Sequence[LayerSums], numbers: jax.Array) -> Sums:
        found = [i for i, own in enumerate(sums) if name in own]
        stacked: Sums = jax.tree.map(lambda *rows: jnp.stack(rows), *(sums[i][name] for i in found))
        return stacked.of_layers(numbers[np.array(found)], self.count)

    def run_layer(
        self, index: int, x: Float[Array, "B T D"], context: Context, cache: LayerCache, dtype: jax.typing.DTypeLike
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """Run one unstacked layer with its cache while decoding; return x and the updated cache."""
        graphdef, state = nnx.split(self.layers[index])
        run = _with_gathered_weights(_layer_runner(graphdef, context), dtype)
        x, cache, _ = run(x, state, cache, None, context.beside)
        return x, cache

    def run_together(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        caches: Sequence[LayerCache],
        dtype: jax.typing.DTypeLike,
        group: int,
    ) -> tuple[Float[Array, "B T D"], list[LayerCache]]:
        """Decode approximately: `group` attention sublayers at a time read the same input, to save communication.

        They do not depend on each other, so that devices that split them sum their outputs at once (EasySpec, Wu et al.
        2025, arXiv:2502.02493). The feed-forward sublayers follow one after the other.

        Returns:
          x, and the caches.

        Raises:
          ValueError: the layers are stacked.
        """
        if self.scanned:
            raise ValueError("layers run together only if they are not stacked (model.scan_layers=false).")
        new_caches: list[LayerCache] = []
        for start in range(0, len(self.layers), group):
            blocks = [_with_weights(block, dtype) for block in self.layers[start : start + group]]
            updates = []
            for block, cache in zip(blocks, caches[start : start + group], strict=True):
                update, cache = block.attend(x, context, cache)
                updates.append(update)
                new_caches.append(cache)
            for block, update in zip(blocks, updates, strict=True):
                x = block.finish(x, update, context)
        return x, new_caches

    def _run_single(
        self,
        indices: Iterable[int],
        x: jax.Array,
        context: Context,
        caches: Caches,
        key: jax.Array | None,
        dtype: jax.typing.DTypeLike,
    ) -> tuple[jax.Array, list[LayerCache], LayerSums, Beside]:
        """Run the unstacked layers `indices` in order.

        Returns:
          x, their caches, their sums, and what later layers read beside x.
        """
        new_caches = []
        sums = []
        beside = context.beside
        numbers = [self.layer_numbers(index)[0] for index in indices]
        runners: dict[nnx.GraphDef, RunLayer] = {}
        for index, number in zip(indices, numbers, strict=True):
            graphdef, state = nnx.split(self.layers[index])
            if graphdef not in runners:
                run = _with_gathered_weights(_layer_runner(graphdef, context), dtype)
                run = rematerialise(run, self.remat, scanned=False)
                # Equal layers share one jitted function, which is traced, differentiated and lowered once. Outside of a
                # trace jit would compile it at each call.
                runners[graphdef] = jax.jit(run) if isinstance(x, Tracer) else run
            cache = caches[index] if caches else None
            x, cache, own = runners[graphdef](x, state, cache, fold_key(key, number), beside.of_layer(number))
            beside, cache = beside.after(cache)
            new_caches.append(cache)
            sums.append(_recorded(own, context))
        return x, new_caches, self._of_layers(sums, np.array(numbers)), beside

    def _scan(
        self, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: jax.typing.DTypeLike
    ) -> tuple[jax.Array, list[LayerCache], LayerSums]:
        """Run all stacked layers by a scan; return x, their caches and sums."""
        states = [nnx.state(self.layers[i]) for i in self.scanned]

        gathers = caches is None and gathers_ahead() and self.remat not in OFFLOADED
        # The loop that gathers ahead has gradients of x and the weights only, and returns no experts.
        if gathers and not context.beside.has_gradients and not context.records_experts:
            x, sums = self._scan_prefetched(x, states, context, key, dtype)
            return x, [], sums

        def body(
            x: jax.Array, layer: tuple[list[Weights], Caches, jax.Array, jax.Array | None]
        ) -> tuple[jax.Array, tuple[list[LayerCache], list[LayerSums]]]:
            states, caches, step, inputs = layer
            own = context._replace(beside=context.beside._replace(inputs=inputs))
            return self.run_repetition(x, gather_layers(states, dtype), own, caches, key, step)

        body = rematerialise(body, self.remat, scanned=True)
        caches = [caches[i] for i in self.scanned] if caches else None
        inputs = context.beside.inputs
        if inputs is not None:
            last = self.start + self.period * self.repeats
            inputs = inputs[self.start : last].reshape(self.repeats, self.period, *inputs.shape[1:])
        x, (new_caches, sums) = jax.lax.scan(body, x, (states, caches, jnp.arange(self.repeats), inputs))
        return x, new_caches, self._of_layers(sums, np.array([self.layer_numbers(i) for i in self.scanned]))

    def _scan_prefetched(
        self,
        x: jax.Array,
        states: list[Weights],
        context: Context,
        key: jax.Array | None,
        dtype: jax.typing.DTypeLike,
    ) -> tuple[jax.Array, LayerSums]:
        """Run all stacked layers by a scan that all-gathers the next layer's weights while one computes."""

        def make_layer(shared: tuple[Context, jax.Array | None]) -> Callable[..., tuple[jax.Array, LayerSums]]:
            context, key = shared

            def run(x: jax.Array, weights: list[Weights], step: jax.Array) -> tuple[jax.Array, LayerSums]:
                x, (_, sums) = self.run_repetition(x, weights, context, None, key, step)
                return x, self.sums_of_repetition(sums, step)

            return rematerialise(run, self.remat, scanned=True)

        return run_prefetched(make_layer, lambda states: gather_layers(states, dtype), x, states, (context, key))


def _recorded(sums: LayerSums, context: Context) -> LayerSums:
    """Return a layer's sums without the experts that it chose, unless they are recorded."""
    if ROUTER not in sums or context.records_experts:
        return sums
    return {**sums, ROUTER: cast(RouterSums, sums[ROUTER])._replace(experts=None)}


def _block_maker(config: ModelConfig, layer: Layer) -> Callable[[nnx.Rngs], Block]:
    return lambda rngs: Block(config, layer, rngs)


def _with_weights(block: Block, dtype: jax.typing.DTypeLike) -> Block:
    """Return a layer with its weights all-gathered and cast to `dtype`."""
    graphdef, state = nnx.split(block)
    return nnx.merge(graphdef, gather_weights(state, dtype))


def _layer_runner(graphdef: nnx.GraphDef, context: Context) -> RunLayer:
    """Return a function that runs a layer with given weights."""

    def run(
        x: jax.Array, weights: Weights, cache: LayerCache | None, key: jax.Array | None, beside: Beside
    ) -> LayerOutput:
        block = set_adapter_dropout_keys(nnx.merge(graphdef, weights), key)
        return block(name_layer_input(x), context._replace(beside=beside), cache, key)

    return run


def _with_gathered_weights(run: RunLayer, dtype: jax.typing.DTypeLike) -> RunLayer:
    """Wrap a layer function so that it all-gathers and casts the stored weights first."""

    def layer(
        x: jax.Array, state: Weights, cache: LayerCache | None, key: jax.Array | None, beside: Beside
    ) -> LayerOutput:
        # Profiles show layers under the name of this function.
        return run(x, gather_weights(state, dtype), cache, key, beside)

    return layer
