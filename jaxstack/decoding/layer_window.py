"""Text generation with models larger than device memory: it has a few layers at a time, read from disk ahead of use.

A thread reads the weights of the next layers while one layer runs (TPI-LLM, Li et al. 2024, arXiv:2410.00531). The
output head counts as a layer; of the embedding only the rows of a step's tokens are read.
"""

import concurrent.futures
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jaxstack.decoding.cache_room import make_cache
from jaxstack.decoding.decode import Params, cast_matrices
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.rows import Column, Pages, RecentTokens, RowTokens, pack_rows, sampled_logits, split_packed
from jaxstack.decoding.step import Programs
from jaxstack.models.layer import CacheRoom, Context, LayerCache
from jaxstack.models.transformer import Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel.rules import AxisRules
from jaxstack.parallel.sharding_context import logical_axis_rules

_TABLE = "embedding/table"


class StoredWeights(Protocol):
    """Interface of model weights on disk, such as `jaxstack.models.huggingface.load.ModelParts`."""

    def read(self, path: str, dtypes: PyTree) -> PyTree:
        """Read the parameters at or below a path in the parameter tree, in the dtypes given by the tree `dtypes`."""
        ...

    def rows(self, path: str, numbers: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N D"]:
        """Read the given rows of a weight matrix, such as the embeddings of some tokens."""
        ...


class WeightWindow:
    """Keeps some parts of a model in device memory; the others are read ahead of their use, in turns.

    Args:
      count: number of parts, which are used in order; after the last comes the first again.
      size: largest number of parts in device memory. Of fewer than `count`, two are read in turns, evenly spread over
        the model, so that a part is read while others are used.
      read: reads one part into device memory.
    """

    def __init__(self, count: int, size: int, read: Callable[[int], Params]):
        turns = 0 if size >= count else count - size + min(size, 2)
        self.turns = [number * count // turns for number in range(turns)]
        """Numbers of the parts that are read in turns."""
        self.slots = min(size, 2, turns)
        """Largest number of these parts in memory."""
        self._read = read
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "weight window")
        first = [number for number in range(count) if number not in self.turns[self.slots :]]
        self._parts = {number: self._thread.submit(read, number) for number in first}
        self._following = itertools.islice(itertools.cycle(self.turns), self.slots, None)

    def take(self, number: int) -> Params:
        """Return the weights of a part, waiting until they are in device memory.

        Raises:
          Exception: the error of the read, if it failed.
        """
        return self._parts[number].result()

    def release(self, number: int, after: Array) -> None:
        """Delete a part that was read in turn when `after` has been computed with it, and read another."""
        if number not in self.turns:
            return
        jax.block_until_ready(after)
        for x in jax.tree.leaves(self._parts.pop(number).result()):
            x.delete()
        following = next(self._following)
        self._parts[following] = self._thread.submit(self._read, following)

    def close(self) -> None:
        """Stop the thread that reads ahead, and drop all weights."""
        self._thread.shutdown(cancel_futures=True)
        self._parts.clear()


class WindowDecoder(Decoder):
    """Generates tokens on one device with a model of which only a few layers are in device memory at a time.

    Args:
      module: the functional form of the Transformer, with unrolled layers.
      stored: its weights.
      non_params: its other variables.
      rules: sharding rules of a mesh of one device.
      resident: number of layers in device memory at a time.
      vocab_size: number of ids that may be generated, if the model has more rows than the tokenizer has ids.
    """

    def __init__(
        self,
        module: ModuleArrays,
        stored: StoredWeights,
        non_params: Params,
        rules: AxisRules,
        *,
        resident: int,
        vocab_size: int | None = None,
    ):
        super().__init__(module, module.abstract_params, non_params, rules, vocab_size=vocab_size, steps=1)
        self.stored = stored
        self.make_programs = WindowPrograms
        layers = module.merge(module.abstract_params, module.abstract_non_params).decoder.layers
        kinds = [nnx.graphdef(layer) for layer in layers]
        self.alike = [kinds.index(kind) for kind in kinds]
        """First layer of the same structure as each, whose compiled program it shares."""
        self.head = "embedding" if self.config.tie_word_embeddings else "head"
        names = [name for name in self.params if name not in ("decoder", "embedding", "head")]
        self.others = {name: self._read(name) for name in names}
        """Parameters that stay in device memory."""
        paths = [f"decoder/layers/{number}" for number in range(len(kinds))] + [self.head]
        self.total_bytes = _bytes(self.params)
        """Bytes of all weights in the compute dtype."""
        self.window = WeightWindow(len(paths), resident, lambda number: self._read(paths[number]))
        sizes = [_bytes(self._dtypes(path)) for path in paths]
        turns = sorted((sizes.pop(number) for number in reversed(self.window.turns)), reverse=True)
        self.window_bytes = _bytes(self.others) + sum(sizes) + sum(turns[: self.window.slots])
        """Bytes of weights that are in device memory at most."""

    def load(self, params: Params, non_params: Params) -> None:
        """Set the parameters' shapes and dtypes (their values stay on disk) and the values of the other variables."""
        self.params = jax.eval_shape(lambda params: cast_matrices(self.module, params, self.rules), params)
        self.non_params = non_params

    def unload(self) -> None:
        """Stop the thread that reads ahead, and free the cache. The decoder cannot be used any more."""
        self.window.close()
        self._free_cache()

    @property
    def weight_bytes(self) -> int:
        return self.window_bytes

    def embedding_rows(self, tokens: Int[np.ndarray, " T"]) -> Float[np.ndarray, "T D"]:
        """Read the rows of the embedding matrix for these tokens."""
        return self.stored.rows(_TABLE, tokens).astype(self.params["embedding"]["table"].dtype)

    def merge(self, parts: Params) -> Transformer:
        """Return the model with the parameters in `parts` as arrays, and its other parameters as shapes and dtypes."""
        return self.module.merge({**self.params, **parts}, self.non_params)

    def _read(self, path: str) -> Params:
        """Read the parameters at or below a path from disk into device memory, one at a time."""

        def place(keys: tuple[Any, ...], like: Any) -> Array:
            leaf = "/".join([path, *(key.key for key in keys)])
            return jax.device_put(self.stored.read(leaf, like), self.rules.sharding(jax.P()))

        return jax.tree.map_with_path(place, self._dtypes(path))

    def _dtypes(self, path: str) -> PyTree:
        return functools.reduce(lambda tree, key: tree[key], path.split("/"), self.params)


class WindowPrograms(Programs):
    """Programs of the engine that run one layer at a time, each with its weights from the window.

    Args:
      model: the decoder with the window.
      room, settings: as in `Programs`.
    """

    def __init__(self, model: WindowDecoder, room: CacheRoom, **settings: Any):
        super().__init__(model, room, **settings)
        self.window_model = model
        self._enter = jax.jit(self._enter_step)
        self._layer = jax.jit(self._layer_step, static_argnames="index", donate_argnames=("x", "cache"))
        self._leave = jax.jit(self._leave_step)

    @functools.cached_property
    def _make_cache(self) -> Callable[[Params, Params], Pages]:
        # The parameters are shapes, which a compiled function does not take.
        make = jax.jit(functools.partial(make_cache, self.model, self.model.params, self.model.non_params, self.room))
        return lambda params, non_params: make()

    def forward(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
        drafted: Int[np.ndarray, "R D"] | Int[Array, "R D"] | None,
        recent: RecentTokens | None = None,
    ) -> Float[Array, "all V"]:
        """Run all layers on the tokens of a step; update the cache and return the logits to sample from."""
        model = self.window_model
        newest = np.asarray(self._last)[rows[:, Column.SLOT], None] if drafted is None else np.asarray(drafted)
        groups = [(rows, newest)]
        if chunks is not None and tokens is not None:
            groups.append((chunks, tokens))
        ids = np.concatenate([part.ravel() for _, part in groups])
        x = self._enter(model.others, model.embedding_rows(ids)[None], groups)
        for number, index in enumerate(model.alike):
            weights = model.window.take(number)
            x, self._pages[number] = self._layer(weights, x, groups, cache=self._pages[number], index=index)
            model.window.release(number, x)
        head = len(model.alike)
        logits = self._leave(model.others, model.window.take(head), x, groups)
        model.window.release(head, logits)
        return logits

    def _context(self, model: Transformer, groups: Sequence[RowTokens]) -> Context:
        _, positions, slots = pack_rows(groups, self.room.pages, self.room.page_size)
        return model.packed_context(positions, slots)

    def _enter_step(
        self, others: Params, rows: Float[Array, "1 T D"], groups: Sequence[RowTokens]
    ) -> Float[Array, "1 T D"]:
        """Return the input of the first layer, given `rows`, the rows of the embedding matrix for the tokens."""
        with logical_axis_rules(self.model.rules, self.model.layout):
            model = self.window_model.merge(others)
            return model.enter(rows, self._context(model, groups))

    def _layer_step(
        self, weights: Params, x: Float[Array, "1 T D"], groups: Sequence[RowTokens], cache: LayerCache, *, index: int
    ) -> tuple[Float[Array, "1 T D"], LayerCache]:
        """Run a layer with the given weights; return its output and its updated cache.

        `index` is the first layer with the same structure, so that all layers of one structure share a program.
        """
        params = self.model.params["decoder"]
        layers = {**params["layers"], str(index): weights}
        with logical_axis_rules(self.model.rules, self.model.layout):
            model = self.window_model.merge({"decoder": {**params, "layers": layers}})
            return model.decoder.run_layer(index, x, self._context(model, groups), cache, model.dtype)

    def _leave_step(
        self, others: Params, head: Params, x: Float[Array, "1 T D"], groups: Sequence[RowTokens]
    ) -> Float[Array, "all V"]:
        """Return the logits after the tokens to sample from, given the last layer's output and the output head."""
        with logical_axis_rules(self.model.rules, self.model.layout):
            model = self.window_model.merge({**others, self.window_model.head: head})
            return sampled_logits(model, split_packed(model.leave(x)[0], groups))


def _bytes(tree: PyTree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
