"""The layers of a Transformer: stacked along a leading `layers` dim and run by a scan, or unrolled.

Layers whose records alternate (mixers, windows, experts) are scanned in groups: a pattern of p records is p stacks that
one scan runs together. Layers before the pattern and after its last whole repetition are unrolled.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Key

from jaxstack.models.adapters import set_adapter_dropout_keys
from jaxstack.models.block import Block
from jaxstack.models.config import ModelConfig
from jaxstack.models.dropout import fold_key
from jaxstack.models.layer import Context, Layer, LayerCache
from jaxstack.models.layer_weights import (
    Weights,
    add_layers_logical_axis,
    gather_layers,
    gather_weights,
    remove_layers_logical_axis,
    run_prefetched,
)
from jaxstack.models.remat import OFFLOADED, name_layer_input, rematerialise
from jaxstack.parallel import gathers_ahead

Caches = list[LayerCache] | None
"""Caches in the order of `Stack.layers`: of a single layer, or of a stack with a leading dim of layers."""

RouterLoss = Float[Array, ""] | None
"""Losses of a layer's router summed over tokens; None for a dense layer."""

LayerOutput = tuple[jax.Array, LayerCache | None, jax.Array | None]
"""(x [B, T, D], cache, router loss) after one layer."""

RunLayer = Callable[[jax.Array, Weights, LayerCache | None, jax.Array | None], LayerOutput]
"""(x, weights, cache, dropout key) -> output of one layer."""


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
    ) -> tuple[Float[Array, "B T D"], Caches, RouterLoss]:
        """Run all layers, each with its weights all-gathered and cast to `dtype` only where they are used.

        Returns:
          x, the caches, and the sum of the layers' router losses (None if all layers are dense).
        """
        x, new_caches, losses = self.run_before_scan(x, context, caches, key, dtype)
        if self.scanned:
            x, found, scan_losses = self._scan(x, context, caches, key, dtype)
            new_caches = new_caches + found
            losses = losses + scan_losses
        x, found, last_losses = self.run_after_scan(x, context, caches, key, dtype)
        return x, [*new_caches, *found] if caches else None, add_losses([*losses, *last_losses])

    def run_before_scan(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        caches: Caches,
        key: Key[Array, "..."] | None,
        dtype: jax.typing.DTypeLike,
    ) -> tuple[Float[Array, "B T D"], list[LayerCache], list[RouterLoss]]:
        """Run the unstacked layers before the scan; return x, their caches and their router losses."""
        return self._run_single(range(self.scanned.start), x, context, caches, key, dtype)

    def run_after_scan(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        caches: Caches,
        key: Key[Array, "..."] | None,
        dtype: jax.typing.DTypeLike,
    ) -> tuple[Float[Array, "B T D"], list[LayerCache], list[RouterLoss]]:
        """Run the unstacked layers after the scan; return x, their caches and their router losses."""
        return self._run_single(range(self.scanned.stop, len(self.layers)), x, context, caches, key, dtype)

    def run_repetition(
        self,
        x: Float[Array, "B T D"],
        weights: Sequence[Weights],
        context: Context,
        caches: Caches,
        key: Key[Array, "..."] | None,
        step: int | jax.Array,
    ) -> tuple[Float[Array, "B T D"], tuple[list[LayerCache], list[RouterLoss]]]:
        """Run the layers of one repetition of the model's layer pattern, which is one iteration of the scan.

        Args:
          weights: gathered weights of the pattern's layers, from `gather_layers`.
          step: number of the repetition.

        Returns:
          x, and the layers' caches and router losses.
        """
        new_caches = []
        losses = []
        for i, state in enumerate(weights):
            run = _layer_runner(nnx.graphdef(self.layers[self.start + i]), context)
            number = self.start + step * self.period + i
            x, cache, loss = run(x, state, caches[i] if caches else None, fold_key(key, number))
            new_caches.append(cache)
            losses.append(loss)
        return x, (new_caches, losses)

    def run_layer(
        self, index: int, x: Float[Array, "B T D"], context: Context, cache: LayerCache, dtype: jax.typing.DTypeLike
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """Run one unstacked layer with its cache while decoding; return x and the updated cache."""
        graphdef, state = nnx.split(self.layers[index])
        x, cache, _ = _with_gathered_weights(_layer_runner(graphdef, context), dtype)(x, state, cache, None)
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
                x = block.finish(x, update)
        return x, new_caches

    def _run_single(
        self,
        indices: Iterable[int],
        x: jax.Array,
        context: Context,
        caches: Caches,
        key: jax.Array | None,
        dtype: jax.typing.DTypeLike,
    ) -> tuple[jax.Array, list[LayerCache], list[RouterLoss]]:
        """Run the unstacked layers `indices` in order; return x, their caches and their router losses."""
        new_caches = []
        losses = []
        runners: dict[nnx.GraphDef, RunLayer] = {}
        for index in indices:
            graphdef, state = nnx.split(self.layers[index])
            if graphdef not in runners:
                run = _with_gathered_weights(_layer_runner(graphdef, context), dtype)
                run = rematerialise(run, self.remat, scanned=False)
                # Equal layers share one jitted function, which is traced, differentiated and lowered once. Outside of a
                # trace jit would compile it at each call.
                runners[graphdef] = jax.jit(run) if isinstance(x, Tracer) else run
            cache = caches[index] if caches else None
            x, cache, loss = runners[graphdef](x, state, cache, fold_key(key, self.layer_numbers(index)[0]))
            new_caches.append(cache)
            losses.append(loss)
        return x, new_caches, losses

    def _scan(
        self, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: jax.typing.DTypeLike
    ) -> tuple[jax.Array, list[LayerCache], list[RouterLoss]]:
        """Run all stacked layers by a scan; return x, their caches and their router losses."""
        states = [nnx.state(self.layers[i]) for i in self.scanned]

        if caches is None and gathers_ahead() and self.remat not in OFFLOADED:
            x, losses = self._scan_prefetched(x, states, context, key, dtype)
            return x, [], losses

        def body(
            x: jax.Array, layer: tuple[list[Weights], Caches, jax.Array]
        ) -> tuple[jax.Array, tuple[list[LayerCache], list[RouterLoss]]]:
            states, caches, step = layer
            return self.run_repetition(x, gather_layers(states, dtype), context, caches, key, step)

        body = rematerialise(body, self.remat, scanned=True)
        caches = [caches[i] for i in self.scanned] if caches else None
        x, (new_caches, losses) = jax.lax.scan(body, x, (states, caches, jnp.arange(self.repeats)))
        return x, new_caches, jax.tree.map(jnp.sum, losses)

    def _scan_prefetched(
        self,
        x: jax.Array,
        states: list[Weights],
        context: Context,
        key: jax.Array | None,
        dtype: jax.typing.DTypeLike,
    ) -> tuple[jax.Array, list[RouterLoss]]:
        """Run all stacked layers by a scan that all-gathers the next layer's weights while one computes."""

        def make_layer(shared: tuple[Context, jax.Array | None]) -> Callable[..., tuple[jax.Array, list[RouterLoss]]]:
            context, key = shared

            def run(x: jax.Array, weights: list[Weights], step: jax.Array) -> tuple[jax.Array, list[RouterLoss]]:
                x, (_, losses) = self.run_repetition(x, weights, context, None, key, step)
                return x, losses

            return rematerialise(run, self.remat, scanned=True)

        return run_prefetched(make_layer, lambda states: gather_layers(states, dtype), x, states, (context, key))


def add_losses(losses: Sequence[RouterLoss]) -> RouterLoss:
    """Sum the router losses of layers; None if all layers are dense."""
    found = [loss for loss in losses if loss is not None]
    return functools.reduce(jnp.add, found) if found else None


def _block_maker(config: ModelConfig, layer: Layer) -> Callable[[nnx.Rngs], Block]:
    return lambda rngs: Block(config, layer, rngs)


def _with_weights(block: Block, dtype: jax.typing.DTypeLike) -> Block:
    """Return a layer with its weights all-gathered and cast to `dtype`."""
    graphdef, state = nnx.split(block)
    return nnx.merge(graphdef, gather_weights(state, dtype))


def _layer_runner(graphdef: nnx.GraphDef, context: Context) -> RunLayer:
    """Return a function that runs a layer with given weights."""

    def run(x: jax.Array, weights: Weights, cache: LayerCache | None, key: jax.Array | None) -> LayerOutput:
        block = set_adapter_dropout_keys(nnx.merge(graphdef, weights), key)
        return block(name_layer_input(x), context, cache, key)

    return run


def _with_gathered_weights(run: RunLayer, dtype: jax.typing.DTypeLike) -> RunLayer:
    """Wrap a layer function so that it all-gathers and casts the stored weights first."""

    def layer(x: jax.Array, state: Weights, cache: LayerCache | None, key: jax.Array | None) -> LayerOutput:
        # Profiles show layers under the name of this function.
        return run(x, gather_weights(state, dtype), cache, key)

    return layer
