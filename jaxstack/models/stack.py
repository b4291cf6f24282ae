"""Many equal blocks as one: parameters stacked along a leading `layers` dim, run by a scan, or unrolled.

Layers that alternate (windows) form groups: a period of p kinds is p stacks, scanned together; a remainder is unrolled.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxstack.models.attention import Context
from jaxstack.models.block import Block
from jaxstack.models.config import ModelConfig
from jaxstack.parallel import gather_parameter
from pallas_kernels import save_attention

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


def stack_blocks(make: Callable[[nnx.Rngs], Block], count: int, rngs: nnx.Rngs) -> Block:
    """A block each of whose parameters has a leading dim of `count`, independently initialised."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    keys = jax.random.split(rngs.params(), count)
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys)
    return nnx.merge(graphdef, _label_stacked(state))


class Stack(nnx.Module):
    """The layers of a Transformer.

    `layers` are blocks; the first `period` of them are stacked `repeats` times when `config.scan_layers`.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        windows = config.windows()
        self.period = _period(windows)
        self.repeats = config.num_layers // self.period if config.scan_layers else 1
        if self.repeats == 1:
            self.period = config.num_layers
        scanned = self.period * self.repeats
        parts = []
        for window in windows[: self.period]:
            make = _block_maker(config, window)
            parts.append(stack_blocks(make, self.repeats, rngs) if self.repeats > 1 else make(rngs))
        parts += [Block(config, window, rngs) for window in windows[scanned:]]
        self.layers = nnx.List(parts)
        self.remat = config.remat

    def numbers(self, index: int) -> range:
        """Which layers of the model `layers[index]` stands for, counted from 0."""
        scanned = self.period * self.repeats
        if self.repeats > 1 and index < self.period:
            return range(index, scanned, self.period)
        number = index if self.repeats == 1 else scanned + index - self.period
        return range(number, number + 1)

    def __call__(
        self, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: Any
    ) -> tuple[jax.Array, Caches]:
        """x [B, T, D] through all layers, weights cast to `dtype` and gathered a layer at a time."""
        index, new = 0, []
        if self.repeats > 1:
            x, new = self._scan(x, context, caches, key, dtype)
            index = self.period * self.repeats
        for i in range(len(new) or 0, len(self.layers)):
            graphdef, state = nnx.split(self.layers[i])
            run = rematerialise(_runner(graphdef, context, dtype), self.remat, scanned=False)
            cache = caches[i] if caches else None
            x, cache = run(x, state, cache, _fold(key, index))
            index += 1
            new.append(cache)
        return x, new if caches else None

    def _scan(
        self, x: jax.Array, context: Context, caches: Caches, key: jax.Array | None, dtype: Any
    ) -> tuple[jax.Array, list[Any]]:
        split = [nnx.split(self.layers[i]) for i in range(self.period)]
        states = [state for _, state in split]

        def body(x: jax.Array, layer: Any) -> Any:
            states, caches, step = layer
            new = []
            for i, (graphdef, _) in enumerate(split):
                run = _runner(graphdef, context, dtype)
                x, cache = run(x, _label_layer(states[i]), caches[i] if caches else None, _fold(key, step * self.period + i))
                new.append(cache)
            return x, new

        body = rematerialise(body, self.remat, scanned=True)
        caches = caches[: self.period] if caches else None
        return jax.lax.scan(body, x, (states, caches, jnp.arange(self.repeats)))


def _block_maker(config: ModelConfig, window: int | None) -> Callable[[nnx.Rngs], Block]:
    return lambda rngs: Block(config, window, rngs)


def _runner(graphdef: Any, context: Context, dtype: Any) -> Callable[..., Any]:
    def run(x: jax.Array, state: Any, cache: Any, key: jax.Array | None) -> Any:
        block = nnx.merge(graphdef, gather_weights(state, dtype))
        x = checkpoint_name(x, "block_input")
        return block(x, context, cache, key)

    return run


def _fold(key: jax.Array | None, index: Any) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, index)


def _period(windows: tuple[int | None, ...]) -> int:
    """The shortest pattern that, repeated, gives the whole sequence (the last repetition may be cut short)."""
    for period in range(1, len(windows) + 1):
        if all(w == windows[i % period] for i, w in enumerate(windows)):
            return period
    return len(windows)


def rematerialise(body: Callable[..., Any], policy: str, *, scanned: bool) -> Callable[..., Any]:
    """`body` under `jax.checkpoint` with one of `ModelConfig.remat`'s named policies."""
    policies = jax.checkpoint_policies
    if policy == "none":
        return body
    if policy == "full":
        rule = policies.nothing_saveable
    elif policy == "save_attention":
        rule = save_attention
    elif policy == "save_dots":
        rule = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, save_attention)
    else:
        rule = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["block_input"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    # Inside a scan the loop itself keeps XLA from merging the recomputation with the original.
    return jax.checkpoint(body, policy=rule, prevent_cse=not scanned)
