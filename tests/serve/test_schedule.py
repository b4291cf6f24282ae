"""The engine over a simulated device: whatever arrives, is cancelled or preempted, each answer is that of its prompt.

The simulated device keeps token ids in the pages instead of keys and values, and the next token is a hash of all tokens
that it finds there. So a wrong page, a page with two owners, or a lost or repeated token changes the answer. A state of
a slot is the tokens that it has been given.
"""

import types
import zlib
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from jaxstack.decoding import engine as engine_module
from jaxstack.decoding import runner as runner_module
from jaxstack.decoding import schedule as schedule_module
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.ngram_draft import NGramDrafter, accept
from jaxstack.decoding.requests import Request
from jaxstack.decoding.rows import Column, RowTable
from jaxstack.decoding.step import Programs
from jaxstack.decoding.step_shapes import ChunkShape, StepSeconds, chunk_shapes, decode_batch_sizes, timed_depths
from jaxstack.models.layer import CacheRoom
from jaxstack.serve.config import EngineConfig

V = 3
CONTEXT = 40
TEXT = [0, 1, 2, 2] * 5


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens)) % V


def answer(prompt: list[int], count: int, stop: int | None) -> list[int]:
    """The answer that the engine must give."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and (token := next_token(tokens)) != stop:
        tokens.append(token)
    return tokens[len(prompt) :]


class Sampled(np.ndarray):
    """Tokens that are on the device."""

    def copy_to_host_async(self) -> None:
        pass


class SimulatedPrograms(Programs):
    """Pages of token ids. Everything that no token has been written to holds a wrong one."""

    has_states = False

    def __init__(self, model, room, *, vocab_size, halves_from, constant_steps):
        self.constant_steps = constant_steps
        self.slots = room.slots
        self.page_size = room.page_size
        width = -(-room.length // room.page_size)
        self.table = RowTable(room.slots, width, room.page_size, lambda request: None)
        self.memory = np.full(room.pages * room.page_size, 255)
        self.newest = np.full(room.slots, 254)
        self.states: list[list[int]] = [[]] * room.rows

    def copy_states(self, copies):
        for source, target in copies:
            self.states[target] = self.states[source]

    def put_newest(self, tokens):
        self.newest = tokens.copy()

    def run(self, rows, chunks, tokens, mode, mask=None, drafted=None, recent=None, **_):
        assert (recent is not None) == (self.has_states and drafted is not None)
        newest = self.newest[rows[:, Column.SLOT], None] if drafted is None else drafted
        parts = [(rows, newest, newest.shape[1])] + ([] if chunks is None else [(chunks, tokens, 1)])
        for lines, ids, _ in parts:
            for line, own in zip(lines, ids, strict=True):
                start = line[Column.START]
                count = line[Column.COUNT]
                if count:
                    self.memory[self._places(line)[start : start + count]] = own[-count:]
        if self.has_states:
            decoded = (newest, rows[:, Column.COUNT]) if recent is None else recent
            self._advance_states(rows, *decoded, rows[:, Column.START] + 1)
            if chunks is not None:
                counts = chunks[:, Column.COUNT]
                self._advance_states(chunks, tokens, counts, chunks[:, Column.START] + counts)
        sampled = []
        for lines, _, samples in parts:
            for line in lines:
                end = line[Column.START] + line[Column.COUNT]
                memory = self.memory[self._places(line)].tolist()
                ends = range(end - samples + 1, end + 1)
                sampled += [next_token(memory[:stop]) if line[Column.COUNT] and stop > 0 else 253 for stop in ends]
                if drafted is None and line[Column.STORE] < self.slots:
                    self.newest[line[Column.STORE]] = sampled[-1]
        return np.array(sampled).view(Sampled)

    def run_steps(self, rows, steps, most, mode):
        assert steps <= most
        sampled = np.full((most, len(rows)), 253)
        for step in range(steps):
            now = rows.copy()
            active = rows[:, Column.COUNT] > step
            now[:, Column.START] += step
            now[:, Column.COUNT] = active
            now[~active, Column.STORE] = self.slots
            sampled[step] = self.run(now, None, None, mode)
        return sampled.view(Sampled)

    def _advance_states(self, rows, tokens, counts, ends):
        """The last `count` tokens of each row follow those in the state of its slot, up to `ends`."""
        for row, own, count, end in zip(rows, tokens, counts, ends, strict=True):
            if count:
                slot = row[Column.SLOT]
                self.states[slot] = [*(self.states[slot] if end > count else []), *own[-count:].tolist()]
                assert self.states[slot] == self.memory[self._places(row)[:end]].tolist()

    def _places(self, line: np.ndarray) -> np.ndarray:
        table = line[Column.PAGES :].astype(int)
        return (table[:, None] * self.page_size + np.arange(self.page_size)).ravel()


class SimulatedDraft:
    """Guesses that depend on the newest token alone, and are sometimes right, if its memory has all earlier tokens."""

    catches_up = True
    fills_prompts = False

    def __init__(self, target, model, width, together, most):
        self.target = target
        self.width = width
        self.most = most
        self.approximate = together > 1
        self.memory = np.full_like(target.memory, 251)
        self.copy_states = target.copy_states

    def run(self, rows, newest, chunks, tokens, mode, mask=None, recent=None, **_):
        self._run_exactly(rows, newest, recent if self.approximate else None)
        if chunks is not None:
            self.fill(rows, chunks, tokens)
        drafted = np.zeros((len(rows), self.width), int)
        for line, row, token in zip(drafted, rows, newest, strict=True):
            for column in range(self.width - row[Column.COUNT], self.width):
                line[column] = token
                token = token * 2 % V
            start = row[Column.START]
            if row[Column.COUNT] and not self.approximate:
                ids = line[-row[Column.COUNT] :]
                self.memory[self.target._places(row)[start : start + row[Column.COUNT]]] = ids
        sampled = self.target.run(rows, chunks, tokens, mode, mask, drafted, recent if self.target.replays else None)
        after = sampled[: drafted.size].reshape(drafted.shape)
        kept = []
        for line, row, found in zip(drafted, rows, after, strict=True):
            start = self.width - max(1, row[Column.COUNT])
            kept.append(len(accept(line[start + 1 :].tolist(), found[start:].tolist())) - 1)
        return np.concatenate([sampled, kept]).view(Sampled)

    def run_steps(self, rows, newest, recent, steps, mode):
        def step(now, newest, texts, recent):
            found = self.run(now, newest, None, None, mode, None, recent)
            samples = found[: len(now) * self.width].reshape(len(now), self.width).tolist()
            firsts = self.width - now[:, Column.COUNT]
            kept = found[len(now) * self.width :]
            return [line[first : first + count + 1] for line, first, count in zip(samples, firsts, kept, strict=True)]

        texts = [[token] for token in newest.tolist()]
        return steps_with_drafts(step, rows, texts, recent, steps, self.most, self.width)

    def _run_exactly(self, rows, newest, recent):
        """Before it guesses, the draft model has run all earlier tokens exactly, if layers run together just now."""
        for number, row in enumerate(rows):
            places = self.target._places(row)
            start = row[Column.START]
            if row[Column.COUNT] and recent is not None:
                again, count = recent.tokens[number], recent.counts[number]
                self.memory[places[start + 1 - count : start + 1]] = again[-count:]
                assert again[-1] == newest[number]
                self.memory[places[start + 1 : start + row[Column.COUNT]]] = 252
            if row[Column.COUNT] > 1:
                assert (self.memory[places[:start]] == self.target.memory[places[:start]]).all()

    def fill(self, rows, chunks, tokens):
        for row, ids in zip(chunks, tokens, strict=True):
            if row[Column.COUNT]:
                start = row[Column.START]
                self.memory[self.target._places(row)[start : start + row[Column.COUNT]]] = ids[-row[Column.COUNT] :]

    def catch_up(self, chunks, tokens):
        self.fill(None, chunks, tokens)


def steps_with_drafts(step, rows, texts, recent, steps, most, width):
    """What a program of several steps gives; `step` takes rows, newest tokens and texts, and returns new tokens."""
    assert steps <= most
    found = np.zeros((most, len(rows), width + 2), int)
    given = np.zeros(len(rows), int)
    for number in range(steps):
        if (given >= rows[:, Column.COUNT]).all():
            break
        now = rows.copy()
        now[:, Column.START] += given
        now[:, Column.COUNT] = np.minimum(rows[:, Column.COUNT] - given, width)
        if recent is not None:
            recent.counts[now[:, Column.COUNT] == 0] = 0
        taken = step(now, np.array([text[-1] if text else 0 for text in texts]), texts, recent)
        for place, (text, new) in enumerate(zip(texts, taken, strict=True)):
            count = now[place, Column.COUNT]
            new = new if count else []
            found[number, place, : len(new)] = new
            found[number, place, width:] = len(new), max(0, count - 1)
            given[place] += len(new)
            text += new
            if recent is not None and count:
                recent.tokens[place, -len(new) :] = new
                recent.counts[place] = len(new)
    return found.view(Sampled)


class SimulatedNGrams:
    """Drafts from earlier text within a program of several steps."""

    def __init__(self, target, width, most):
        self.target = target
        self.width = width
        self.most = most

    def run(self, rows, described, recent, steps, mode):
        def step(now, newest, texts, recent):
            drafted = np.zeros((len(now), self.width), int)
            for line, row, text in zip(drafted, now, texts, strict=True):
                if row[Column.COUNT]:
                    guessed = NGramDrafter(text).guess(row[Column.COUNT] - 1)
                    row[Column.COUNT] = 1 + len(guessed)
                    line[-1 - len(guessed) :] = (text[-1], *guessed)
            samples = self.target.run(now, None, None, mode, None, drafted, recent).reshape(drafted.shape)
            firsts = self.width - now[:, Column.COUNT]
            return [
                accept(line[first + 1 :].tolist(), own[first:].tolist())
                for line, own, first in zip(drafted, samples, firsts, strict=True)
            ]

        texts = [[*row.request.tokens] for row in rows] + [[] for _ in described[len(rows) :]]
        return steps_with_drafts(step, described, texts, recent, steps, self.most, self.width)


class ScriptedChoice:
    """Steps with drafts and without in a given order, which is repeated."""

    foresees = False

    def __init__(self, order: list[bool]):
        self.order = order
        self.steps = 0
        self.observed = list[tuple[int, int]]()

    def wants(self, rows: int, foreseen: float) -> bool:
        return self.order[self.steps % len(self.order)]

    def observe(self, rows: int, drafts: bool, steps: int, tokens: int) -> None:
        self.steps += 1
        self.observed.append((rows, tokens))


def choose_room(models, config: EngineConfig, further) -> CacheRoom:
    return CacheRoom(config.slots, CONTEXT, config.pages, config.page_size, config.snapshots or 0)


@pytest.fixture
def make_engine(monkeypatch):
    model = types.SimpleNamespace(
        check_ids=lambda _: None,
        check_whole=lambda _: None,
        config=types.SimpleNamespace(vocab_size=V, num_nextn_predict_layers=0),
        context_length=None,
        batch_unit=1,
    )
    monkeypatch.setattr(engine_module, "Programs", SimulatedPrograms)
    monkeypatch.setattr(engine_module, "DraftPrograms", SimulatedDraft)
    monkeypatch.setattr(runner_module, "NGramSteps", SimulatedNGrams)
    monkeypatch.setattr(engine_module, "choose_room", choose_room)
    monkeypatch.setattr(schedule_module, "_STATE_TOKENS", 1)

    def make(config: EngineConfig, draft: bool = False, fills: bool = False) -> Engine:
        has_states = config.snapshots is not None
        monkeypatch.setattr(SimulatedDraft, "fills_prompts", fills)
        monkeypatch.setattr(SimulatedPrograms, "has_states", has_states)
        monkeypatch.setattr(engine_module, "shares_pages", lambda model: not has_states)
        return Engine(model, config, draft=model if draft else None, warm_up=False, start=False)

    return make


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, V - 1), min_size=1, max_size=10)  # prompt, alone or after the beginning of a text
        | st.builds(lambda count, end: [*TEXT[:count], *end], st.integers(1, 20), st.lists(st.just(1), max_size=10)),
        st.integers(1, 10),  # tokens of the answer
        st.sampled_from([None, None, 0]),  # stop token
        st.integers(0, 6),  # steps before it arrives
        st.sampled_from([None, None, None, 0, 3]),  # tokens after which it is cancelled
    ),
    min_size=1,
    max_size=12,
)

orders = st.lists(st.booleans(), min_size=1, max_size=8)
"""Which steps have drafts."""


@st.composite
def configs(draw) -> EngineConfig:
    """Any sizes, with few pages more than one request needs."""
    size = draw(st.sampled_from([1, 3, 8]))
    snapshots = draw(st.sampled_from([None, None, 0, 1, 3]))
    return EngineConfig(
        slots=draw(st.integers(1, 5)),
        page_size=size,
        pages=-(-CONTEXT // size) + draw(st.integers(0, 12)),
        chunk=draw(st.sampled_from([16, 64])),
        step_tokens=draw(st.sampled_from([None, 64, 128])),
        prefix_cache=draw(st.booleans()),
        decode_steps=draw(st.sampled_from([1, 2, 5, 8])),
        steps_ahead=draw(st.integers(0, 3)),
        snapshots=snapshots,
        draft_tokens=draw(st.sampled_from([0, 0, 3])),
        draft_layers_together=draw(st.sampled_from([1, 2])),
        drafts=draw(st.sampled_from(["auto", "always"])),
    )


@pytest.mark.longer
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=requests, config=configs(), draft=st.booleans(), order=orders, catches_up=st.booleans(), fills=st.booleans()
)
def test_each_answer_is_that_of_its_prompt(make_engine, asked, config, draft, order, catches_up, fills):
    """At any page size, pool size, number of steps ahead and of drafts; steps with and without drafts in any order."""
    engine = make_engine(config, draft and config.draft_tokens > 0, fills)
    if engine.scheduler.choice is not None:
        engine.scheduler.choice = ScriptedChoice(order)
        engine.scheduler.catches_up = catches_up
    handles = {}
    turn = 0
    while len(handles) < len(asked) or engine.step():
        for number, (prompt, count, stop, arrival, _) in enumerate(asked):
            if arrival <= turn and number not in handles:
                handles[number] = engine.submit(prompt, count, stop_tokens=[] if stop is None else [stop])
        for number, handle in handles.items():
            cancelled = asked[number][4]
            if cancelled is not None and handle.count >= cancelled:
                handle.cancel()
        engine.step()
        turn += 1
        assert turn < 2000, "the engine does not come to an end"
    for number, (prompt, count, stop, _, cancelled) in enumerate(asked):
        found = handles[number].result()
        wanted = answer(prompt, count, stop)
        if handles[number].finish_reason == "cancelled":
            assert cancelled is not None and found == wanted[: len(found)]
        else:
            assert found == wanted
            assert handles[number].finish_reason == ("length" if len(wanted) == count else "stop")
    assert engine.pool.used == 0 and engine.running == engine.waiting == 0
    ends = sum(handle.stop_token is not None for handle in handles.values())
    assert engine.stats.generated_tokens == sum(handle.count for handle in handles.values()) + ends


def run(engine: Engine, prompt: list[int]) -> tuple[int, int]:
    """Answer a prompt alone; return how many of its tokens were cached, and in how many chunks the others came."""
    before = engine.stats.steps
    handle = engine.submit(prompt, 1)
    while engine.step():
        pass
    assert handle.result() == answer(prompt, 1, None)
    return handle.cached_tokens, engine.stats.steps - before


def test_states_are_kept_a_chunk_apart_and_where_a_prompt_leaves_an_earlier_one(make_engine):
    engine = make_engine(EngineConfig(slots=2, pages=40, page_size=4, chunk=16, snapshots=4))
    assert run(engine, [1] * 39) == (0, 3), "chunks end after 16 and 32 tokens, as they do without snapshots"
    assert run(engine, [1] * 31) == (16, 2), "its pages lead on to the 28th token, where a snapshot is made"
    assert run(engine, [1] * 30) == (28, 1) and run(engine, [*[1] * 25, 2]) == (16, 2)
    assert run(engine, [*[1] * 26, 2]) == (24, 1) and len(engine.pool._snapshots) == 4
    assert run(engine, [2] * 18) == (0, 2), "the snapshot after 32 tokens has not been used"
    assert run(engine, [1] * 38) == (28, 2) and engine.scheduler.prefix_hits == 112


def test_a_snapshot_goes_with_the_last_page_of_its_prefix(make_engine):
    engine = make_engine(EngineConfig(slots=1, pages=10, page_size=4, chunk=16, snapshots=2))
    assert run(engine, [1] * 18)[0] == 0 and len(engine.pool._snapshots) == 1
    assert run(engine, [2] * 38)[0] == 0 and run(engine, [1] * 18)[0] == 0


def test_shapes_have_room_for_every_budget():
    for tokens in (16, 64, 100, 512, 2048):
        for slots in (1, 3, 64):
            shapes = chunk_shapes(tokens, slots)
            assert max(shape.rows * shape.width for shape in shapes) == tokens or tokens < 64
            assert all(1 <= shape.rows <= max(slots, 1) and shape.width <= tokens for shape in shapes)
            together = chunk_shapes(tokens, slots, 4 * tokens)
            assert set(together) - set(shapes) <= {(min(4, slots), tokens)} and together[-1].width == tokens
            assert chunk_shapes(tokens, slots, tokens) == shapes
    assert (
        decode_batch_sizes(64) == (2, 4, 16, 64)
        and decode_batch_sizes(1) == (1,)
        and decode_batch_sizes(10) == (2, 3, 10)
        and decode_batch_sizes(512) == (2, 4, 16, 64, 256, 512)
    )


def test_steps_beside_answers_have_the_shapes_that_are_fast_enough():
    short = ChunkShape(1, 64)
    half = ChunkShape(1, 256)
    whole = ChunkShape(1, 512)
    seconds = StepSeconds(1.0, {0.25: {short: 1.2, half: 2.0, whole: 3.4}, 1.0: {short: 1.4, half: 3.0, whole: 6.4}})
    assert seconds.shapes_within(2, 0) == (short, half) and seconds.shapes_within(9, 1) == (short, half, whole)
    assert seconds.shapes_within(2.5, 0.25) == (short, half), "at a depth that was measured"
    assert seconds.shapes_within(2.5, 0.26) == (short,), "as long as at the next one: copies of keys have few sizes"
    slow = StepSeconds(1.0, {1.0: {half: 5.0, whole: 7.0}})
    assert slow.shapes_within(2, 0) == (half,), "the fastest is always one of them"
    assert timed_depths(1024) == [1.0] and timed_depths(8192) == [0.125, 0.25, 0.5, 1.0]


def test_a_long_prompt_is_cut_by_what_runs_beside_it_and_short_ones_share_a_chunk(make_engine):
    engine = make_engine(EngineConfig(slots=3, pages=40, page_size=8, chunk=32, prefix_cache=False))
    engine.scheduler.shapes_beside = lambda depth: (ChunkShape(1, 8),)
    plans = []
    for prompt in ([1] * 30, [2] * 20):
        engine.submit(prompt, 9)
        engine._take_messages()
        plans.append(engine.scheduler.plan(in_flight=False))
    assert [plan.shape for plan in plans] == [(1, 32), (1, 8)] and len(plans[1].decoded) == 1


def test_fewer_tokens_of_a_prompt_are_computed_beside_answers_the_more_there_are_before_them(make_engine):
    engine = make_engine(EngineConfig(slots=2, pages=40, page_size=8, chunk=16, prefix_cache=False))
    engine.scheduler.shapes_beside = lambda depth: (ChunkShape(1, 8 if depth < 0.5 else 4),)
    widths = []
    for prompt in ([1] * 8, [2] * 36):
        engine.submit(prompt, 4)
        engine._take_messages()
        while (plan := engine.scheduler.plan(in_flight=False)) is not None and plan.shape is not None:
            widths.append(plan.shape.width)
    assert engine.context == 40 and widths == [16, 8, *[4] * 7], "by where the widest chunk would end"


def test_the_shape_computes_most_tokens_with_the_least_padding(make_engine):
    scheduler = make_engine(EngineConfig(slots=8, pages=400, page_size=8, chunk=512)).scheduler

    def shape_for(*left: int) -> tuple[int, int] | None:
        pending = [types.SimpleNamespace(filled=0, target=n, tokens=[0] * n, sampled=0) for n in left]
        return scheduler._chunk_prompts(pending)[1]

    assert shape_for(600) == (1, 512) and shape_for(300) == (1, 512) and shape_for(200) == (1, 256)
    assert shape_for(60) == (1, 64) and shape_for(20, 20) == (2, 64) and shape_for(64, 64, 64) == (4, 64)
    assert shape_for(*[64] * 8) == (8, 64)


def test_many_waiting_prompts_start_in_one_step_if_they_fill_more_than_half_of_it(make_engine):
    config = EngineConfig(slots=4, pages=40, page_size=8, chunk=16, step_tokens=64, prefix_cache=False)
    shapes = []
    tokens = [15, 14, 9, 16, 16, 16]
    engine = make_engine(config)
    for number, count in enumerate(tokens):
        engine.submit([1] * count, 2)
        engine._take_messages()
        if number in (1, 5):  # two prompts wait, and then four
            while (plan := engine.scheduler.plan(in_flight=False)) is not None and plan.shape is not None:
                shapes.append((*plan.shape, len(plan.chunks)))
            for sequence in list(engine.scheduler.running):
                engine.scheduler.finish(sequence)
    assert shapes == [(1, 16, 1), (1, 16, 1), (4, 16, 4)]
    with pytest.raises(ValueError, match=r"step_tokens \(32\) must be at least engine.chunk \(64\)"):
        EngineConfig(chunk=64, step_tokens=32)


@pytest.mark.parametrize("draft", [False, True])
def test_steps_with_drafts_end_with_the_last_token(make_engine, draft):
    """None runs for nothing; pages that were taken for rejected drafts are free again."""
    config = EngineConfig(slots=1, page_size=4, pages=40, chunk=16, draft_tokens=3, drafts="always", decode_steps=8)
    engine = make_engine(config, draft)
    for count in (1, 2, 9, 20):
        before = engine.stats.steps, engine.stats.draft_steps
        handle = engine.submit([1, 2] * 4, count)
        while engine.step():
            filled = handle.filled if handle.slot is not None else 0
            assert handle.slot is None or engine._runner.busy or len(handle.pages) == -(-(filled + 1) // 4)
        assert handle.result() == answer([1, 2] * 4, count, None)
        assert 1 <= engine.stats.steps - before[0] <= count, "the prompt's step gives a token, and each other one too"
        assert engine.stats.draft_steps - before[1] < engine.stats.steps - before[0] or count == 1
    assert engine.stats.programs["decode"] < engine.stats.steps - 4, "programs had several steps"


@pytest.mark.parametrize("draft", [False, True])
def test_preempted_requests_go_on_without_drafts(make_engine, draft):
    """In the slot of another, of which the device has the newest token."""
    for prefix in range(V):
        engine = make_engine(EngineConfig(slots=2, page_size=4, pages=10, chunk=16, draft_tokens=3), draft)
        prompts = [[prefix] * 7, [1, 2] * 3]
        handles = [engine.submit(prompt, 30) for prompt in prompts]
        while engine.step():
            pass
        assert [handle.result() for handle in handles] == [answer(prompt, 30, None) for prompt in prompts]
        assert engine.scheduler.preemptions > 0 and engine.stats.draft_steps == 0


def test_a_draft_model_computes_what_shared_pages_lack_of_its_cache(make_engine):
    """Those of an answer without drafts; `SimulatedDraft` looks whether it has all tokens when it guesses."""
    engine = make_engine(EngineConfig(slots=1, page_size=4, pages=40, chunk=16, draft_tokens=3), draft=True)
    prompt = [1] * 9
    for drafts in (False, True):
        engine.scheduler.choice = ScriptedChoice([drafts])
        handle = engine.submit(prompt, 12)
        while engine.step():
            pass
        assert handle.result() == answer(prompt, 12, None)
        prompt = [*prompt, *handle.result(), 2]
    assert handle.cached_tokens >= 16 and engine.stats.draft_tokens > 0


@pytest.mark.parametrize("fills", [True, False])
def test_a_draft_model_computes_a_prompt_when_it_guesses(make_engine, monkeypatch, fills):
    """Not while steps have no drafts, unless it has to compute the tokens in their order."""
    calls = list[int]()
    fill = SimulatedDraft.fill
    monkeypatch.setattr(SimulatedDraft, "fill", lambda self, *args: calls.append(len(calls)) or fill(self, *args))
    engine = make_engine(EngineConfig(slots=1, page_size=4, pages=40, chunk=16, draft_tokens=3), True, fills)
    for drafts in (False, True):
        before = len(calls)
        engine.scheduler.choice = ScriptedChoice([drafts])
        handle = engine.submit([1] * 9, 12)
        while engine.step():
            pass
        assert handle.result() == answer([1] * 9, 12, None)
        assert (len(calls) > before) == (fills or drafts)
    assert engine.stats.draft_tokens > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_the_choice_of_drafts_counts_tokens_up_to_the_end_of_an_answer(make_engine, drafts):
    """The stop token included; not what the same program computed after it, nor programs that ran ahead."""
    choice = ScriptedChoice([drafts])
    engine = make_engine(EngineConfig(slots=2, page_size=4, pages=40, chunk=16, draft_tokens=3), draft=True)
    engine.scheduler.choice = choice
    prompts = [[1, 2, 0], [2, 2, 1]]
    texts = [answer(prompt, 25, 0) for prompt in prompts]
    handles = [engine.submit(prompt, 25, stop_tokens=[0]) for prompt in prompts]
    while engine.step():
        pass
    assert [handle.result() for handle in handles] == texts
    ends = sum(len(text) + (len(text) < 25) for text in texts)
    assert ends == sum(tokens for _, tokens in choice.observed) < 50
    assert all(tokens >= rows for rows, tokens in choice.observed)


@pytest.mark.parametrize("draft", [False, True])
def test_requests_with_drafts_are_decoded_in_the_same_steps(make_engine, draft):
    """Each step gives every running request a token at least, though their prompts were computed in different steps."""
    config = EngineConfig(slots=4, pages=40, page_size=4, chunk=16, draft_tokens=3, drafts="always")
    engine = make_engine(config, draft)
    handles = [engine.submit([number] * (16 - number), 12) for number in range(3)]
    while engine.step():
        pass
    assert all(handle.count == 12 for handle in handles)
    assert engine.stats.programs["decode"] <= 12


def test_requests_of_a_lower_number_start_first_and_are_preempted_last(make_engine):
    """One after another, in the order of their arrival where the numbers are equal; then two that outgrow the pages."""
    engine = make_engine(EngineConfig(slots=1, page_size=4, pages=10, chunk=16))
    asked = [engine.submit([1], 4, priority=priority) for priority in (5, 0, -1, 0)]
    order = list[Request]()
    while engine.step():
        order += [request for request in engine.scheduler.running if request not in order]
    assert [asked.index(request) for request in order] == [2, 1, 3, 0]
    engine = make_engine(EngineConfig(slots=2, page_size=4, pages=10, chunk=16, prefix_cache=False))
    late, urgent = (engine.submit([1] * 9, 25, priority=priority) for priority in (0, -1))
    while engine.step():
        assert late.finish_reason is None or urgent.finish_reason is not None
    assert engine.scheduler.preemptions == 1 and late.result() == answer([1] * 9, 25, None) == urgent.result()
