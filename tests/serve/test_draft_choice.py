"""The choice between steps with drafts and without, on a simulated clock and in engines that decode."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from jaxstack.decoding.draft_choice import DraftChoice
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.requests import Request
from jaxstack.decoding.sampling import Sampling
from jaxstack.models.recurrent import GatedDelta
from jaxstack.serve.config import EngineConfig
from tests.serve.test_engine import GREEDY, expected
from tests.serve.test_mtp_draft import CONFIG as PREDICTING
from tests.serve.test_mtp_draft import few_ids, guesses
from tests.serve.test_schedule import ScriptedChoice
from tests.serve.tiny import CONFIG as CONFIG_OF_TESTS
from tests.serve.tiny import open_tiny

ORDER = [True, True, False, False, True, True, True, False]
CONFIG = CONFIG_OF_TESTS.model_copy(update={"vocab_size": 8})
"""With so few ids n-grams repeat."""
DELTA = {
    "num_layers": 2,
    "layer_types": ("delta", "full_attention"),
    "delta": GatedDelta(num_heads=2, head_dim=8, num_key_heads=1, key_head_dim=8),
}
SIZES = EngineConfig(slots=3, page_size=4, chunk=16, context=120, decode_steps=3, draft_tokens=3)
AT_ONCE = 8
"""Steps that run as one program."""


@dataclasses.dataclass
class Machine:
    """Decodes with a choice; a step takes `plain` seconds, or with drafts `drafted`, and then gives a row `tokens`.

    A program of steps with drafts has `at_once` of them, and takes `gap` seconds besides.
    """

    plain: float
    drafted: float
    tokens: float
    noise: float = 0.0
    at_once: int = 1
    gap: float = 0.0
    seconds: float = 0.0

    def __post_init__(self):
        self.choice = DraftChoice(lambda: self.seconds)
        self.random = np.random.default_rng(0)
        self.given = 0.0
        """Tokens that a row got."""

    def step(self, rows: int = 1, extra: float = 0.0) -> int:
        """Run a program that takes `extra` seconds more than usual; return the tokens by drafts that it gave a row."""
        drafts = self.choice.wants(rows)
        steps = self.at_once if drafts else AT_ONCE
        usual = steps * self.drafted + self.gap if drafts else steps * self.plain
        self.seconds += usual * (1 + self.noise * self.random.exponential()) + extra
        tokens = steps + int(self.random.binomial(9 * steps, (self.tokens - 1) / 9)) if drafts else steps
        self.given += tokens
        self.choice.observe(rows, drafts, steps, tokens * rows)
        return tokens * drafts

    def run(self, tokens: int, rows: int = 1) -> float:
        """Run until each row has got this many tokens; return the share of them that steps with drafts gave."""
        began = self.given
        drafted = 0
        while self.given < began + tokens:
            drafted += self.step(rows)
        return drafted / (self.given - began)


@pytest.mark.longer
@settings(max_examples=6, deadline=None)
@given(
    drafted=st.floats(0.5, 20),
    tokens=st.floats(1, 5),
    noise=st.sampled_from([0, 0.1]),
    rows=st.sampled_from([1, 3, 8, 100]),
)
def test_trials_cost_little_whatever_is_faster(drafted, tokens, noise, rows):
    machine = Machine(0.001, 0.001 * drafted, tokens, noise)
    machine.run(20_000, rows)
    took = machine.seconds / (20_000 * 0.001 * (1 + noise))
    assert took < 1.04
    if drafted / tokens < 0.8:  # clearly faster
        assert took < 1.04 * drafted / tokens


@settings(max_examples=8, deadline=None)
@given(
    drafted=st.floats(0.5, 8),
    tokens=st.floats(1, 5),
    gap=st.sampled_from([0, 0.001, 0.01]),
    at_once=st.sampled_from([1, 3, 8, 32]),
    noise=st.sampled_from([0, 0.1]),
)
@example(drafted=0.75, tokens=2.0, gap=0.001, at_once=1, noise=0)  # whose tokens vary much by chance
def test_programs_of_several_steps_with_drafts_never_take_longer_than_without(drafted, tokens, gap, at_once, noise):
    """Of their time all counts, such as what each of them waits for the host, however many steps it has."""
    machine = Machine(0.001, 0.001 * drafted, tokens, noise, at_once, gap)
    machine.run(20_000)
    took = machine.seconds / (20_000 * 0.001 * (1 + noise))
    with_drafts = (drafted + gap / 0.001 / at_once) / tokens
    assert took < 1.04 and (with_drafts > 0.9 or took < 1.04 * with_drafts)


def test_programs_of_very_many_steps_are_tried_too():
    assert Machine(0.001, 0.0012, 3.0, at_once=256).run(60_000) > 0.5


def test_steps_that_are_fast_in_slow_programs_are_not_chosen():
    """Most programs have one step of 1 ms, but one in four waits 12 ms for the host."""
    machine = Machine(0.001, 0.0012, 1.9)
    for number in range(4000):
        machine.step(extra=0.012 if machine.choice.wants(1) and number % 4 == 0 else 0.0)
    assert machine.run(2000) < 0.1


@pytest.mark.parametrize(("before", "after"), [(1.0, 4.0), (4.0, 1.0)])
def test_the_choice_follows_the_text(before, after):
    machine = Machine(0.001, 0.0018, before, noise=0.2)
    machine.run(2000)
    assert (machine.run(20_000) > 0.5) == (before > 2)
    machine.tokens = after
    machine.run(100_000)
    assert (machine.run(20_000) > 0.5) == (after > 2)


def test_each_number_of_rows_has_its_own_choice():
    """In powers of two, of requests that come and go."""
    machine = Machine(0.001, 0.0018, 3.0)
    alone = together = 0.0
    for _ in range(20):
        machine.drafted = 0.0018
        alone = machine.run(500, rows=1)
        machine.drafted = 0.008
        together = machine.run(500, rows=5)
    assert alone > 0.9 and together < 0.1


def test_a_compilation_changes_no_choice():
    """It takes part of the time of the first step of a kind, or of a later one for another number of rows."""
    machine = Machine(0.001, 0.0018, 3.0)
    drafts = False
    for number in range(200):
        first = machine.choice.wants(1) and not drafts
        drafts |= first
        machine.step(extra=30.0 if first or number in (0, 3, 15) else 0.0)
    assert drafts
    assert machine.run(2000) > 0.9


@settings(max_examples=30, deadline=None)
@given(drafted=st.floats(1.02, 3), tokens=st.floats(1, 5), rows=st.sampled_from([1, 8]))
def test_foreseen_drafts_are_used_where_they_are_faster(drafted, tokens, rows):
    """Without trials; until both kinds are measured a step with drafts is assumed to take a quarter longer."""
    seconds = 0.0
    choice = DraftChoice(lambda: seconds, foresees=True)
    steps = [0, 0]
    for _ in range(400):
        drafts = choice.wants(rows, tokens)
        seconds += 8 * (drafted if drafts else 1.0)
        choice.observe(rows, drafts, 8, round(8 * rows * (tokens if drafts else 1)))
        steps[drafts] += 1
    if tokens > 1.06 * max(drafted, 1.25):
        assert steps[True] > 380
    elif tokens < 1.04 * drafted or tokens < 1.05 * 1.25:
        assert steps[True] < 10, "those that measure the duration, at most"


def test_steps_with_prompts_are_not_measured():
    """Without two steps in a row that decode alone nothing is measured, and there are hardly any drafts."""
    machine = Machine(0.001, 0.0001, 3.0)
    for _ in range(400):
        machine.step()
        machine.seconds += 0.05
        machine.choice.observe(0, False, 1, 1)
        assert not machine.choice.wants(1)
    machine.run(2000)
    assert machine.run(2000) > 0.9
    machine.drafted = 0.02  # slower now, but not measured as long as prompts are computed after each step
    drafted = 0
    for _ in range(400):
        drafted += machine.step()
        machine.seconds += 0.05
        machine.choice.observe(0, False, 1, 1)
    assert drafted > 0
    machine.run(2000)
    assert machine.run(2000) < 0.1


@pytest.mark.longer
@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        (CONFIG, None),
        (CONFIG, "same"),
        (CONFIG.model_copy(update={"num_layers": 3}), "together"),
        (CONFIG.model_copy(update=DELTA), None),
        (CONFIG.model_copy(update=DELTA), "same"),
        (PREDICTING, None),
        (PREDICTING.model_copy(update=DELTA), None),
    ],
    ids=["ngram", "model", "together", "ngram_states", "model_states", "mtp", "mtp_states"],
)
def test_greedy_text_is_the_same_with_drafts_in_some_steps(model, drafts):
    """Beside others and after a cached answer. The model's own guesses are right if its cache has all tokens."""
    decoder = open_tiny(config=model)
    asked = few_ids([21, 9, 33, 18])
    config = SIZES.model_copy(update={"draft_layers_together": 1 + (drafts == "together")})
    with Engine(decoder, config, draft=decoder if drafts else None, warm_up=False) as engine:
        engine.scheduler.choice = ScriptedChoice(ORDER)
        handles = [engine.submit(prompt, 30, GREEDY) for prompt in asked]
        answers = [handle.result() for handle in handles]
        assert answers == [expected(decoder, prompt, 30) for prompt in asked]
        longer = [*asked[0], *answers[0], 5]
        again = engine.submit(longer, 20, GREEDY)
        assert again.result() == expected(decoder, longer, 20)
        stats = engine.stats
        assert 0 < stats.draft_steps < stats.steps and engine.pool.used == 0
        loses_drafts = model.num_nextn_predict_layers and model.layer_types
        assert stats.accepted_tokens > 0 or loses_drafts
        if drafts == "same":
            assert stats.accepted_tokens == stats.draft_tokens


@pytest.mark.longer
def test_sampled_text_is_the_same_with_guesses_from_earlier_text_in_some_steps():
    decoder = open_tiny(config=CONFIG)
    samplings = [Sampling(0.3), Sampling(0.5, top_k=5), Sampling(1.0)]
    asked = [(prompt, samplings[i], i) for i, prompt in enumerate(few_ids([9, 5, 12]))]
    with Engine(decoder, SIZES, warm_up=False) as engine:
        engine.scheduler.choice = ScriptedChoice(ORDER)
        handles = [engine.submit(prompt, 80, sampling, seed=seed) for prompt, sampling, seed in asked]
        for handle, (prompt, sampling, seed) in zip(handles, asked, strict=True):
            assert handle.result() == expected(decoder, prompt, 80, sampling, seed)
        assert engine.stats.accepted_tokens


@pytest.mark.longer
def test_a_prediction_layer_that_caught_up_guesses_what_it_does_in_a_forward_pass():
    model = open_tiny(config=PREDICTING, seed=4)
    (prompt,) = few_ids([37])
    whole = expected(model, prompt, 60)
    text = [*prompt, *whole]
    guessed = guesses(model, text)
    config = EngineConfig(slots=1, page_size=4, chunk=16, decode_steps=3, draft_tokens=1)
    with Engine(model, config, warm_up=False, start=False) as engine:
        engine.scheduler.choice = ScriptedChoice(ORDER)
        request = engine.submit(prompt, 60, GREEDY)
        stats = engine.stats
        before = (0, 0, len(prompt))
        hits = [0, 0]
        while engine.step():
            drafted, accepted = stats.draft_tokens - before[0], stats.accepted_tokens - before[1]
            newest = before[2] - 1
            found = 0
            for _ in range(drafted):  # a program may have several steps, each of which guesses one token
                right = guessed[newest] == text[newest + 1]
                hits[right] += 1
                found += right
                newest += 1 + right
            assert accepted == found
            before = (stats.draft_tokens, stats.accepted_tokens, len(request.tokens))
        assert request.result() == whole and min(hits) > 0


def machine_of(engine: Engine, seconds: dict[bool, float]) -> None:
    """Let the steps of an engine take so many seconds, with drafts and without."""
    clock = [0.0]
    choice = DraftChoice(lambda: clock[0])
    observe = choice.observe

    def observed(rows: int, drafts: bool, steps: int, tokens: int) -> None:
        clock[0] += steps * seconds[drafts]
        observe(rows, drafts, steps, tokens)

    choice.observe = observed
    engine.scheduler.choice = choice


@pytest.mark.longer
@pytest.mark.parametrize("right", [False, True])
def test_drafts_that_never_hit_are_switched_off_and_those_that_do_stay(right, monkeypatch):
    """On a clock that steps with drafts advance three times as far as others."""
    decoder = open_tiny()
    prompt = [1, 2, 3]
    whole = expected(decoder, prompt, 200)

    def guess(request: Request, count: int) -> tuple[int, ...]:
        known = whole[request.count : request.count + count]
        return tuple(known if right else [(token + 1) % 200 for token in known])

    monkeypatch.setattr(Request, "draft_by_ngram", guess)
    config = EngineConfig(slots=1, page_size=4, chunk=16, draft_tokens=3, decode_steps=1)  # the host guesses
    with Engine(decoder, config, warm_up=False) as engine:
        machine_of(engine, {False: 0.001, True: 0.003})
        stats = engine.stats
        shares = []
        for _ in range(4):
            before = stats.draft_steps
            assert engine.submit(prompt, 200, GREEDY).result() == whole
            shares.append((stats.draft_steps - before) / 200)
        assert shares[0] > 0, "drafts are tried"
        assert shares[-1] > 0.2 if right else sum(shares[1:]) == 0
        assert stats.accepted_tokens == (stats.draft_tokens if right else 0)
