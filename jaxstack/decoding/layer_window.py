"""Text generation with models larger than device memory: it has a few layers at a time, read from disk ahead of use.

A thread reads the weights of the next layers while one layer runs (TPI-LLM, Li et al. 2024, arXiv:2410.00531). The
output head counts as a layer; of the embedding only the rows of a step's tokens are read.
"""

import functools
import math
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree, UInt32

from jaxstack.decoding.decode import Decoder, Params, cast_matrices
from jaxstack.decoding.sampling import Sampling
from jaxstack.models.attention.base import LayerCache
from jaxstack.models.attention_layer import Context
from jaxstack.models.transformer import Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel.rules import AxisRules
from jaxstack.parallel.sharding_context import logical_axis_rules

_TABLE = "embedding/table"


class StoredWeights(Protocol):
    """Interface of model weights on disk, such as `jaxstack.models.huggingface.partial_load.ModelParts`."""

    def read(self, path: str, dtypes: PyTree) -> PyTree:
        """Read the parameters at or below a path in the parameter tree, in the dtypes given by the tree `dtypes`."""
        ...

    def rows(self, path: str, numbers: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N D"]:
        """Read the given rows of a weight matrix, such as the embeddings of some tokens."""
        ...


class WeightWindow:
    """Loads a model's layers in an endless cycle, ahead of their use, keeping only a few of them in device memory.

    Args:
      count: number of parts; after the last comes the first again.
      size: largest number of parts in device memory; with `count` or more, each is read once and kept.
      read: reads one part into device memory.
    """

    def __init__(self, count: int, size: int, read: Callable[[int], Params]):
        self._count = count
        self._keeps = size >= count
        self._parts: list[Params] = []
        self._next = 0
        self._ready: queue.Queue[Params | BaseException] = queue.Queue()
        self._free = threading.Semaphore(size)
        self._closed = False
        self._thread = threading.Thread(target=self._read_ahead, args=(read,), name="weight window", daemon=True)
        self._thread.start()

    def take(self) -> Params:
        """Return the weights of the next layer (or the output head), waiting until they are in device memory.

        Raises:
          Exception: the error of the read, if it failed.
        """
        number = self._next
        self._next = (self._next + 1) % self._count
        if number < len(self._parts):
            return self._parts[number]
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        if self._keeps:
            self._parts.append(found)
        return found

    def release(self, weights: Params) -> None:
        """Delete the weights of a layer from device memory after their use, which makes room for another layer."""
        if not self._keeps:
            for x in jax.tree.leaves(weights):
                x.delete()
            self._free.release()

    def close(self) -> None:
        """Stop the thread that reads ahead, and drop the weights that it has read."""
        self._closed = True
        self._free.release()
        self._thread.join()

    def _read_ahead(self, read: Callable[[int], Params]) -> None:
        number = 0
        try:
            while number < self._count or not self._keeps:
                self._free.acquire()
                if self._closed:
                    return
                self._ready.put(read(number % self._count))
                number += 1
        except Exception as error:  # raised where the weights are used
            self._ready.put(error)


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
        super().__init__(module, module.abstract_params, non_params, rules, vocab_size=vocab_size)
        self._stored = stored
        layers = module.merge(module.abstract_params, module.abstract_non_params).decoder.layers
        kinds = [nnx.graphdef(layer) for layer in layers]
        self._alike = [kinds.index(kind) for kind in kinds]
        """First layer of the same structure as each, whose compiled program it shares."""
        self._head = "embedding" if self.config.tie_word_embeddings else "head"
        names = [name for name in self.params if name not in ("decoder", "embedding", "head")]
        self._others = {name: self._read(name) for name in names}
        paths = [f"decoder/layers/{number}" for number in range(len(kinds))] + [self._head]
        sizes = sorted((_bytes(self._dtypes(path)) for path in paths), reverse=True)
        self.window_bytes = _bytes(self._others) + sum(sizes[:resident])
        """Bytes of weights that are in device memory at most."""
        self.total_bytes = _bytes(self.params)
        """Bytes of all weights in the compute dtype."""
        self._window = WeightWindow(len(paths), resident, lambda number: self._read(paths[number]))
        self._enter = jax.jit(self._enter_step)
        self._layer = jax.jit(self._layer_step, static_argnames="index", donate_argnames=("x", "cache"))
        self._leave = jax.jit(self._leave_step)

    def load(self, params: Params, non_params: Params) -> None:
        """Set the parameters' shapes and dtypes (their values stay on disk) and the values of the other variables."""
        self.params = jax.eval_shape(lambda params: cast_matrices(self.module, params, self.rules), params)
        self.non_params = non_params

    def unload(self) -> None:
        """Stop the thread that reads ahead. The decoder cannot be used any more."""
        self._window.close()

    def _read(self, path: str) -> Params:
        """Read the parameters at or below a path from disk into device memory."""
        return jax.device_put(self._stored.read(path, self._dtypes(path)), self.rules.sharding(jax.P()))

    def _dtypes(self, path: str) -> PyTree:
        return functools.reduce(lambda tree, key: tree[key], path.split("/"), self.params)

    def _dispatch(
        self,
        prompts: Int[np.ndarray, "B T"],
        lengths: Int[np.ndarray, " B"],
        seeds: UInt32[np.ndarray, " B"],
        capacity: int,
        max_tokens: int,
        sampling: Sampling,
    ) -> Iterator[Int[Array, " B"]]:
        """Yield the new tokens of all rows of the batch, int32 [B], one step at a time."""
        tokens = prompts
        with jax.set_mesh(self.rules.mesh):
            caches = jax.jit(lambda: self._merge({}).make_cache(len(prompts), capacity).layers)()
        for step in range(max_tokens):
            with jax.set_mesh(self.rules.mesh):
                logits = self._run(tokens, lengths, step, caches)
                token = self._sample(logits, seeds=seeds, step=step, sampling=sampling)
            yield token
            tokens = np.asarray(token)[:, None]

    def _run(
        self, tokens: Int[np.ndarray, "B T"], lengths: Int[np.ndarray, " B"], step: int, caches: list[LayerCache]
    ) -> Float[Array, "B V"]:
        """Run all layers on prompts (step 0) or newest tokens; update the KV caches and return the logits [B, V]."""
        rows = self._stored.rows(_TABLE, tokens.ravel()).astype(self.params["embedding"]["table"].dtype)
        rows = rows.reshape(*tokens.shape, -1)
        place = {"lengths": lengths, "step": None if step == 0 else np.int32(step)}
        x = self._enter(self._others, rows, **place)
        for number, index in enumerate(self._alike):
            weights = self._window.take()
            x, caches[number] = self._layer(weights, x, **place, cache=caches[number], index=index)
            jax.block_until_ready(x)
            self._window.release(weights)
        weights = self._window.take()
        logits = jax.block_until_ready(self._leave(self._others, weights, x, **place))
        self._window.release(weights)
        return logits

    def _merge(self, parts: Params) -> Transformer:
        """Return the model with the parameters in `parts` as arrays, and its other parameters as shapes and dtypes."""
        return self.module.merge({**self.params, **parts}, self.non_params)

    def _context(self, model: Transformer, length: int, lengths: jax.Array, step: jax.Array | None) -> Context:
        if step is None:
            return model.first_context(length, lengths)
        seen = lengths + step - 1
        return model.decode_context(seen[:, None], seen)

    def _enter_step(
        self,
        others: Params,
        rows: Float[Array, "B T D"],
        lengths: Int[Array, " B"],
        step: Int[Array, ""] | None,
    ) -> Float[Array, "B T D"]:
        """Return the input of the first layer, given `rows`, the rows of the embedding matrix for the tokens."""
        with logical_axis_rules(self.rules):
            model = self._merge(others)
            return model.enter(rows, self._context(model, rows.shape[1], lengths, step))

    def _layer_step(
        self,
        weights: Params,
        x: Float[Array, "B T D"],
        lengths: Int[Array, " B"],
        step: Int[Array, ""] | None,
        cache: LayerCache,
        *,
        index: int,
    ) -> tuple[Float[Array, "B T D"], LayerCache]:
        """Run a layer with the given weights; return its output and its updated KV cache.

        `index` is the first layer with the same structure, so that all layers of one structure share a program.
        """
        layers = {**self.params["decoder"]["layers"], str(index): weights}
        with logical_axis_rules(self.rules):
            model = self._merge({"decoder": {**self.params["decoder"], "layers": layers}})
            context = self._context(model, x.shape[1], lengths, step)
            return model.decoder.run_layer(index, x, context, cache, model.dtype)

    def _leave_step(
        self,
        others: Params,
        head: Params,
        x: Float[Array, "B T D"],
        lengths: Int[Array, " B"],
        step: Int[Array, ""] | None,
    ) -> Float[Array, "B V"]:
        """Return each row's next-token logits, given the last layer's output and the weights of the output head."""
        with logical_axis_rules(self.rules):
            model = self._merge({**others, self._head: head})
            last = lengths - 1 if step is None else jnp.zeros_like(lengths)
            return model.logits(model.leave(jnp.take_along_axis(x, last[:, None, None], axis=1)))[:, 0]


def _bytes(tree: PyTree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
