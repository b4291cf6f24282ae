"""Decoding part by part: each part of a model is a program, which runs on the devices that its stage has.

A part is consecutive layers. `layer_window` has parts on one device, whose weights come and go; `pipeline` has a part
for each stage, between which activations are sent.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.decoding.cache_room import copy_row, row_axes
from jaxstack.decoding.compilation import ThreadedCompiler
from jaxstack.decoding.decode import Params
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.rows import Column, Pages, RecentTokens, RowTokens, pack_rows, sampled_logits, split_packed
from jaxstack.decoding.step import Programs
from jaxstack.models.layer import CacheRoom, Context, LayerCache
from jaxstack.models.transformer import Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel.rules import AxisRules
from jaxstack.parallel.sharding_context import logical_axis_rules


class Part(NamedTuple):
    """Consecutive layers of a model that one program runs."""

    layers: tuple[int, ...]
    stage: int
    """Index in `PartedDecoder.stages` of the devices that run it."""
    alike: tuple[int, ...]
    """Layers of the first part of this stage with the same structure, whose compiled program it shares."""


class PartedDecoder(Decoder):
    """Generates tokens with a model that runs part by part. The subclasses say where the weights of a part come from.

    Args:
      module: the functional form of the Transformer, with unrolled layers.
      params: its parameters, or their shapes and dtypes.
      non_params: its other variables.
      stages: sharding rules of the devices of each stage, in the order in which they run; the last one samples.
      key: returns what consecutive layers have in common that are one part.
      stage: returns the index of the stage of a layer.
      options: as in `Decoder`.
    """

    def __init__(
        self,
        module: ModuleArrays,
        params: Params,
        non_params: Params,
        stages: Sequence[AxisRules],
        *,
        key: Callable[[int], Hashable],
        stage: Callable[[int], int] = lambda layer: 0,
        **options: Any,
    ):
        self.stages = list(stages)
        self.dispatching = threading.Lock()
        """Held while a step is dispatched: the programs of several engines reach all devices in one order."""
        super().__init__(module, params, non_params, self.stages[-1], steps=1, **options)
        self.make_programs = PartPrograms
        layers = module.merge(module.abstract_params, module.abstract_non_params).decoder.layers
        kinds = [nnx.graphdef(layer) for layer in layers]
        self.parts: list[Part] = []
        for _, group in itertools.groupby(range(len(layers)), key):
            numbers = tuple(group)
            found = Part(numbers, stage(numbers[0]), numbers)
            same = (part.alike for part in self.parts if part.stage == found.stage and _same(kinds, part, found))
            self.parts.append(found._replace(alike=next(same, numbers)))
        self.head = "embedding" if self.config.tie_word_embeddings else "head"
        """Name of the parameters of the output head."""
        # Compiled once for all engines of this model.
        jit = functools.partial(jax.jit, compiler_options=self.compiler_options)
        self.run_entry = jit(self._enter_step, static_argnames="room")
        self.run_part = jit(self._part_step, static_argnames=("part", "room"), donate_argnames=("x", "caches"))
        self.run_exit = jit(self._leave_step, static_argnames="keeps_states")

    @property
    def entry(self) -> Params:
        """Parameters of the first stage that turn tokens, or their rows of the embedding matrix, into its input."""
        raise NotImplementedError

    @property
    def final(self) -> Params:
        """Parameters of the last stage after its layers, except for the output head."""
        raise NotImplementedError

    def embedding_rows(self, tokens: Int[np.ndarray, " T"]) -> Float[np.ndarray, "T D"] | None:
        """Return the rows of the embedding matrix for these tokens; None if `entry` has the matrix."""
        return None

    def take(self, number: int) -> Params:
        """Return the weights of layer `number`, or of the output head, on their stage; see `release`."""
        raise NotImplementedError

    def release(self, number: int, after: Array) -> None:
        """Let the weights go that `take` returned, when `after` has been computed with them."""

    @functools.cached_property
    def shapes(self) -> Params:
        """Shapes and dtypes of all parameters."""
        return jax.eval_shape(lambda params: params, self.params)

    def merge(self, found: Params) -> Transformer:
        """Return the model with the parameters in `found` as arrays, and its other parameters as shapes and dtypes."""
        return self.module.merge({**self.shapes, **found}, self.non_params)

    def _context(self, model: Transformer, groups: Sequence[RowTokens], room: CacheRoom) -> Context:
        _, positions, slots = pack_rows(groups, room.pages, room.page_size)
        return model.packed_context(positions, slots)

    def _enter_step(
        self,
        entry: Params,
        vectors: Float[Array, "T D"] | None,
        last: Int[Array, " S"],
        groups: Sequence[RowTokens],
        *,
        room: CacheRoom,
    ) -> Float[Array, "1 T D"]:
        """Return the input of the first layer, given the tokens' rows of the embedding matrix, or the matrix."""
        with logical_axis_rules(self.stages[0], self.layout):
            model = self.merge(entry)
            context = self._context(model, groups, room)
            if vectors is not None:
                return model.enter(vectors[None], context)
            (rows, _), *chunks = groups
            ids, *_ = pack_rows([(rows, last[rows[:, Column.SLOT], None]), *chunks], room.pages, room.page_size)
            return model.enter(model.embedding(ids.reshape(context.positions.shape), model.dtype), context)

    def _part_step(
        self,
        weights: Sequence[Params],
        x: Float[Array, "1 T D"],
        groups: Sequence[RowTokens],
        caches: Sequence[LayerCache],
        *,
        part: Part,
        room: CacheRoom,
    ) -> tuple[Float[Array, "1 T D"], list[LayerCache]]:
        """Run the layers of a part with these weights and caches; return x and the caches."""
        params = self.shapes["decoder"]
        found = {**params["layers"], **{str(number): w for number, w in zip(part.layers, weights, strict=True)}}
        updated: list[LayerCache] = []
        with logical_axis_rules(self.stages[part.stage], self.layout):
            model = self.merge({"decoder": {**params, "layers": found}})
            context = self._context(model, groups, room)
            for number, cache in zip(part.layers, caches, strict=True):
                x, cache = model.decoder.run_layer(number, x, context, cache, model.dtype)
                updated.append(cache)
        return x, updated

    def _leave_step(
        self,
        final: Params,
        head: Params,
        x: Float[Array, "1 T D"],
        groups: Sequence[RowTokens],
        *,
        keeps_states: bool,
    ) -> tuple[Float[Array, "all V"], list[Float[Array, "R C D"]]]:
        """Return the logits to sample from, given the last layer's output and the output head, and `states`."""
        with logical_axis_rules(self.rules, self.layout):
            model = self.merge({**final, self.head: head})
            hidden = split_packed(jnp.reshape(model.leave(x), (-1, x.shape[-1])), groups)
            return sampled_logits(model, hidden), hidden if keeps_states else []


class PartPrograms(Programs):
    """Programs of the engine that run a model part by part. All are dispatched without waiting for the devices.

    Args:
      model: the model.
      room, settings: as in `Programs`.
    """

    def __init__(self, model: PartedDecoder, room: CacheRoom, **settings: Any):
        self.parted = model
        super().__init__(model, room, **settings)
        self.compiler = ThreadedCompiler()  # without programs: none returns shapes to parts, which are not its own

    @functools.cached_property
    def _make_cache(self) -> Callable[[Params, Params], Pages]:
        make = jax.jit(self._stage_cache, static_argnums=1, keep_unused=True)

        def make_all(params: Params, non_params: Params) -> Pages:
            del params, non_params  # The parameters may be shapes, which a compiled function does not take.
            pages: list[LayerCache] = []
            for stage, rules in enumerate(self.parted.stages):
                with jax.set_mesh(rules.mesh):  # the argument says on which devices
                    pages += make(jax.device_put(np.zeros(()), rules.sharding(jax.P())), stage)
            return pages

        return make_all

    def _stage_cache(self, place: Array, stage: int) -> list[LayerCache]:
        """Return the empty caches of the layers of a stage. Traceable."""
        del place
        with logical_axis_rules(self.parted.stages[stage], self.model.layout):
            caches = self.parted.merge({}).make_shared_cache(self.room)
        return [caches[number] for part in self.parted.parts if part.stage == stage for number in part.layers]

    def merge(self, params: Params, non_params: Params) -> Transformer:
        del non_params
        return self.parted.merge(params)

    @contextlib.contextmanager
    def starting(self) -> Iterator[list[Future[jax.stages.Compiled]]]:
        """Start nothing: parts are compiled when they first run, one after the other."""
        yield []

    @functools.cached_property
    def _copies(self) -> list[Callable[..., LayerCache]]:
        """Programs that copy a row of the states of each layer."""
        axes = row_axes(self._cache_shapes, self.room)
        return [jax.jit(functools.partial(copy_row, layer), donate_argnames="pages") for layer in axes]

    def copy_states(self, copies: Iterable[tuple[int, int]]) -> None:
        """Dispatch copies of rows of the caches of fixed size, such as states, each (from, to)."""
        for source, target in copies:
            for number, copy in enumerate(self._copies):
                self._pages[number] = copy(np.int32(source), np.int32(target), pages=self._pages[number])

    def run(self, *args: Any, **options: Any) -> Int[Array, "all ..."]:
        """Dispatch one step, as `Programs.run`."""
        with self.parted.dispatching:
            return super().run(*args, **options)

    def score_prompts(self, following: Int[np.ndarray, "Q C"]) -> Int[Array, "Q C columns"]:
        """Score the tokens of the newest step's prompt chunks on the last stage, as `Programs.score_prompts`."""
        model = self.parted
        params = {**model.final, model.head: model.take(len(self._pages))}
        with self.parted.dispatching, jax.set_mesh(model.rules.mesh):
            return self._score(params, {}, self.states[1], following)

    def forward(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
        drafted: Int[np.ndarray, "R D"] | Int[Array, "R D"] | None,
        recent: RecentTokens | None = None,
    ) -> Float[Array, "all V"]:
        """Dispatch all parts on the tokens of a step; update the cache and return the logits to sample from."""
        model = self.parted
        # The tokens of decoded rows matter to the first program alone: the others take the shape.
        groups: list[Any] = [(rows, np.zeros((len(rows), 1), np.int32))]
        if chunks is not None and tokens is not None:
            groups.append((chunks, tokens))
        x = self._embed(groups)
        for part in model.parts:
            rules = model.stages[part.stage]
            with jax.set_mesh(rules.mesh):
                x, caches = model.run_part(
                    [model.take(number) for number in part.layers],
                    jax.device_put(x, rules.sharding(jax.P())),
                    groups,
                    caches=[self._pages[number] for number in part.layers],
                    part=part._replace(layers=part.alike),
                    room=self.room,
                )
            for number, cache in zip(part.layers, caches, strict=True):
                self._pages[number] = cache
                model.release(number, x)
        head = len(self._pages)
        logits, self.states = model.run_exit(model.final, model.take(head), x, groups, keeps_states=self.keeps_states)
        model.release(head, logits)
        return logits

    def _embed(self, groups: Sequence[RowTokens]) -> Float[Array, "1 T D"]:
        """Dispatch the program that computes the input of the first layer from the tokens of a step."""
        model = self.parted
        rules = model.stages[0]
        (rows, _), *chunks = groups
        vectors = None
        if "embedding" not in model.entry:
            newest = np.asarray(self._last)[rows[:, Column.SLOT]]
            vectors = model.embedding_rows(np.concatenate([newest, *(tokens.ravel() for _, tokens in chunks)]))
        with jax.set_mesh(rules.mesh):
            last = jax.device_put(self._last, rules.sharding(jax.P()))
            return model.run_entry(model.entry, vectors, last, groups, room=self.room)


def _same(kinds: Sequence[nnx.GraphDef], one: Part, other: Part) -> bool:
    """Return True if the layers of two parts have the same structures."""
    return [kinds[number] for number in one.layers] == [kinds[number] for number in other.layers]
