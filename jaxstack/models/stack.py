"""Many equal blocks as one: parameters stacked along a leading `layers` dim, run by a scan, or unrolled.

Layers that alternate (windows, experts) form groups: a period of p kinds is p stacks, scanned together; what comes
before and a remainder are unrolled.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from jaxstack.models.adapters import seed_adapters
from jaxstack.models.attention.layer import Context
from jaxstack.models.block import Block
from jaxstack.models.config import ModelConfig
from jaxstack.models.dropout import fold_key
from jaxstack.models.prefetch import run_prefetched
from jaxstack.models.remat import LAYER_INPUT, OFFLOADED, rematerialise
from jaxstack.parallel import gather_parameter, gathers_ahead

Caches = list[Any] | None
"""One cache of the attention kind a stack (leading layers dim) or a single block, in the order of `Stack.layers`."""


def gather_weights(state: Any, dtype: Any) -> Any:
    """Every parameter of an NNX state in the compute dtype and whole over `fsdp` (vectors stay float32)."""

    def gather(p: nnx.Variable) -> nnx.Variable:
        if not isinstance(p, nnx.Param):
            return p
        matmul = p.get_metadata().get("matmul")
        return p.replace(gather_parameter(p, dtype) if matmul is None else matmul.gather(p, dtype))

    return jax.tree.map(gather, state, is_leaf=lambda p: isinstance(p, nnx.Variable))


def _label_stacked(state: Any) -> Any:
    """Variables whose arrays got a leading dim of layers."""
    relabel = lambda p: p.copy(logical_axes=("layers", *p.get_metadata()["logical_axes"]))  # noqa: E731
    return jax.tree.map(relabel, state, is_leaf=lambda p: isinstance(p, nnx.Variable))


def _label_layer(state: Any) -> Any:
    """Variables of one layer of a stack: what describes their dims loses that of the layers."""

    def relabel(p: nnx.Variable) -> nnx.Variable:
        known = p.get_metadata()
        return p.copy(**{name: known[name][1:] for name in ("logical_axes", "whole_shape") if name in known})

    return jax.tree.map(relabel, state, is_leaf=lambda p: isinstance(p, nnx.Variable))


def gather_layers(states: Sequence[Any], dtype: Any) -> list[Any]:
    """`gather_weights` of the states of single layers that were taken out of stacks."""
    return [gather_weights(_label_layer(state), dtype) for state in states]


def make_blocks(make: Callable[[nnx.Rngs], Block], keys: jax.Array) -> Block:
    """A block each of whose parameters has a leading dim, an entry a key, independently initialised.

    They are drawn in a loop: unrolled, the initialisation takes longer to compile than the training step.
    """
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    state = jax.lax.map(lambda key: nnx.state(make(nnx.Rngs(key))), keys)
    return nnx.merge(graphdef, _label_stacked(state))


def unstack_block(stacked: Block, index: int) -> Block:
    """An entry of `make_blocks` as a block of its own."""
    graphdef, state = nnx.split(stacked)
    return nnx.merge(graphdef, _label_layer(jax.tree.map(lambda x: x[index], state)))


class Stack(nnx.Module):
    """The layers of a Transformer.

    `layers` are blocks. With `config.scan_layers` those from `lead` to `lead + period` are stacked `repeats` times;
    the others (dense layers before a mixture of experts, what is left of the last period, `config.ends`) are single.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        kinds = config.layer_kinds()
        self.lead, self.period = config.layer_pattern if config.scan_layers else (0, len(kinds))
        self.repeats = (len(kinds) - config.ends - self.lead) // self.period if config.scan_layers else 1
        if self.repeats == 1:
            self.lead, self.period = 0, len(kinds)
        self.scanned = range(self.lead, self.lead + self.period) if self.repeats > 1 else range(0)
        keys, parts = jax.random.split(rngs.params(), len(kinds)), {}
        for index in self.scanned:
            numbers = range(index, self.lead + self.period * self.repeats, self.period)
            parts[index] = make_blocks(_block_maker(config, *kinds[index]), keys[jnp.array(numbers)])
        single = {i: i for i in range(self.lead)} if self.scanned else {i: i for i in range(len(kinds))}
        if self.scanned:
            end = self.lead + self.period * self.repeats
            single |= {self.scanned.stop + i - end: i for i in range(end, len(kinds))}
        for kind in dict.fromkeys(kinds[number] for number in single.values()):
            alike = [(index, number) for index, number in single.items() if kinds[number] == kind]
            stacked = make_blocks(_block_maker(config, *kind), keys[jnp.array([number for _, number in alike])])
            parts |= {index: unstack_block(stacked, row) for row, (index, _) in enumerate(alike)}
        self.layers = nnx.List([parts[index] for index in sorted(parts)])
        for p in jax.tree.leaves(nnx.state(self.layers, nnx.Param), is_leaf=lambda p: isinstance(p, nnx.Variable)):
            p.set_metadata(sum_where_used=True)  # all of them pass `gather_weights`, once
        self.remat = config.remat

    def numbers(self, index: int) -> range:
        """Which layers of the model `layers[index]` stands for, counted from 0."""
        if index in self.scanned:
            return range(index, self.lead + self.period * self.repeats, self.period)
        number = index if index < self.lead + self.period else index + self.period * (self.repeats - 1)
        return range(number, number + 1)

    def __call__(
        self, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: Any
    ) -> tuple[jax.Array, Caches, jax.Array | None]:
        """x [B, T, D] through all layers, weights cast to `dtype` and gathered a layer at a time.

        Returns x, the caches, and the sum of the blocks' router losses (None where all are dense).
        """
        x, new, losses = self.leading(x, context, caches, key, dtype)
        if self.scanned:
            x, found, of_scan = self._scan(x, context, caches, key, dtype)
            new, losses = new + found, losses + of_scan
        return self.remainder(x, context, caches, key, dtype, (new, losses))

    def leading(
        self, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: Any
    ) -> tuple[jax.Array, list[Any], list[Any]]:
        """x through the layers before the stacked ones, with their caches and router losses."""
        return self._singly(range(self.scanned.start), x, context, caches, key, dtype)

    def remainder(
        self, x: jax.Array, context: Context, caches: Caches, *rest: Any
    ) -> tuple[jax.Array, Caches, jax.Array | None]:
        """x through the layers after the stacked ones; rest = (key, dtype, (caches, losses) of those before)."""
        key, dtype, (new, losses) = rest
        after = range(self.scanned.stop, len(self.layers))
        x, found, own = self._singly(after, x, context, caches, key, dtype)
        return x, [*new, *found] if caches else None, add_losses([*losses, *own])

    def repetition(
        self, x: jax.Array, weights: Sequence[Any], context: Context, caches: Caches, *rest: Any
    ) -> tuple[jax.Array, tuple[list[Any], list[Any]]]:
        """x through one repetition of the stacked layers: `weights` as of `gather_layers`, rest = (key, step).

        Returns x and the layers' caches and router losses.
        """
        key, step = rest
        new, losses = [], []
        for i, state in enumerate(weights):
            run = _runner(nnx.graphdef(self.layers[self.lead + i]), context)
            number = self.lead + step * self.period + i
            x, cache, loss = run(x, state, caches[i] if caches else None, fold_key(key, number))
            new.append(cache)
            losses.append(loss)
        return x, (new, losses)

    def _singly(
        self, parts: range, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: Any
    ) -> tuple[jax.Array, list[Any], list[Any]]:
        new, losses = [], []
        runs: dict[Any, Callable[..., Any]] = {}
        for part in parts:
            graphdef, state = nnx.split(self.layers[part])
            if graphdef not in runs:
                run = rematerialise(_gathering(_runner(graphdef, context), dtype), self.remat, scanned=False)
                # Layers alike are one function: traced, differentiated and lowered once. It would be compiled at each
                # call where nothing is traced.
                runs[graphdef] = jax.jit(run) if isinstance(x, Tracer) else run
            cache = caches[part] if caches else None
            x, cache, loss = runs[graphdef](x, state, cache, fold_key(key, self.numbers(part)[0]))
            new.append(cache)
            losses.append(loss)
        return x, new, losses

    def _scan(
        self, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: Any
    ) -> tuple[jax.Array, list[Any], list[Any]]:
        states = [nnx.state(self.layers[i]) for i in self.scanned]

        if caches is None and gathers_ahead() and self.remat not in OFFLOADED:
            x, losses = self._scan_prefetched(x, states, context, key, dtype)
            return x, [], losses

        def body(x: jax.Array, layer: Any) -> Any:
            states, caches, step = layer
            return self.repetition(x, gather_layers(states, dtype), context, caches, key, step)

        body = rematerialise(body, self.remat, scanned=True)
        caches = [caches[i] for i in self.scanned] if caches else None
        x, (new, losses) = jax.lax.scan(body, x, (states, caches, jnp.arange(self.repeats)))
        return x, new, jax.tree.map(jnp.sum, losses)

    def _scan_prefetched(
        self, x: jax.Array, states: Any, context: Context, key: jax.Array | None, dtype: Any
    ) -> tuple[jax.Array, Any]:
        def layer(shared: tuple[Context, jax.Array | None]) -> Callable[..., Any]:
            context, key = shared

            def run(x: jax.Array, weights: Any, step: jax.Array) -> tuple[jax.Array, Any]:
                x, (_, losses) = self.repetition(x, weights, context, None, key, step)
                return x, losses

            return rematerialise(run, self.remat, scanned=True)

        return run_prefetched(layer, lambda states: gather_layers(states, dtype), x, states, (context, key))


def add_losses(losses: Sequence[jax.Array | None]) -> jax.Array | None:
    """The sum of the router losses of layers; None where all are dense."""
    found = [loss for loss in losses if loss is not None]
    return functools.reduce(jnp.add, found) if found else None


def _block_maker(config: ModelConfig, window: int | None, mixture: bool) -> Callable[[nnx.Rngs], Block]:
    return lambda rngs: Block(config, window, rngs, mixture=mixture)


def _runner(graphdef: Any, context: Context) -> Callable[..., Any]:
    def run(x: jax.Array, weights: Any, cache: Any, key: jax.Array | None) -> Any:
        block = seed_adapters(nnx.merge(graphdef, weights), key)
        x = checkpoint_name(x, LAYER_INPUT)
        return block(x, context, cache, key)

    return run


def _gathering(run: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    def layer(x: jax.Array, state: Any, *rest: Any) -> Any:  # its name is that of the layer in profiles
        return run(x, gather_weights(state, dtype), *rest)

    return layer
