"""A model in stages is served by an engine for each group of requests, with the answers and scores of one device."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxstack.decoding.cache_room import choose_room
from jaxstack.decoding.pipeline import PipelineDecoder, split_stages, stage_shapes
from jaxstack.decoding.scores import TokenScore
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from jaxstack.serve.config import EngineConfig
from jaxstack.serve.engine import EngineGroup, open_engine
from tests.serve.test_engine import GREEDY, SAMPLINGS, prompts
from tests.serve.test_states import MODELS
from tests.serve.tiny import CONFIG, open_tiny

SETTINGS = EngineConfig(slots=3, page_size=4, chunk=16, context=96)


def open_both(name: str, tensor: int = 1):
    settings = {**CONFIG.model_dump(exclude_unset=True), **MODELS[name], "num_layers": 2}
    whole = open_tiny(config=ModelConfig(**settings))
    rules = make_rules(make_mesh(ParallelConfig(pipeline=2, tensor=tensor), jax.devices()[: 2 * tensor]))
    stages = split_stages(rules)
    shapes = stage_shapes(whole.module, stages)
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), whole.params, shapes)
    return whole, PipelineDecoder(whole.module, params, whole.non_params, stages)


@pytest.mark.parametrize(("name", "tensor"), [("plain", 1), ("plain", 2), ("delta", 1)])
@pytest.mark.exhaustive
def test_answers_and_scores_are_those_of_one_device(name, tensor):
    """Prompts of several chunks, a cached prefix (of states by snapshots), more requests than slots, samplings."""
    long, *others = prompts([40, 3, 9, 17, 5])
    asked = [long, *others, [*long[:34], 7, 8]]
    samplings = [SAMPLINGS[number % 3] for number in range(len(asked))]
    samplings[1] = dataclasses.replace(samplings[1], prompt_logprobs=2)

    def ask(engine) -> tuple[list[list[int]], list[TokenScore], np.ndarray]:
        with engine:
            handles = [engine.submit(asked[i], 9, samplings[i], seed=i) for i in range(len(asked))]
            answers = [handle.result() for handle in handles]
            answers.append(engine.submit(asked[-1], 9, GREEDY).result())
            embedded = engine.embed(asked[2])
            embedded.result()
            return answers, handles[1].prompt_scores, embedded.pooled

    whole, pipeline = open_both(name, tensor)
    served = open_engine(pipeline, SETTINGS, warm_up=(name, tensor) == ("plain", 1))
    assert isinstance(served, EngineGroup) and [engine.slots for engine in served.engines] == [2, 2]
    answers, scores, pooled = ask(served)
    wanted, wanted_scores, wanted_pooled = ask(open_engine(whole, SETTINGS, warm_up=False))
    assert answers == wanted and len(scores) == len(asked[1]) - 1
    for one, other in zip(scores, wanted_scores, strict=True):
        np.testing.assert_allclose(one.log_probability, other.log_probability, rtol=1e-4)
        assert one.rank == other.rank and [i for i, _ in one.likeliest] == [i for i, _ in other.likeliest]
    np.testing.assert_allclose(pooled, wanted_pooled, rtol=1e-4, atol=1e-4)
    assert all(engine.stats.generated_tokens for engine in served.engines)


@pytest.mark.longer
def test_the_engines_of_a_pipeline_share_out_slots_pages_and_snapshots_and_share_programs():
    _, pipeline = open_both("delta")
    room = choose_room([pipeline], SETTINGS)
    with open_engine(pipeline, SETTINGS, warm_up=False) as served:
        assert isinstance(served, EngineGroup)
        rooms = [engine.programs.room for engine in served.engines]
        compiled = []
        for engine in served.engines:
            assert len(engine.submit([1, 2, 3], 3, GREEDY).result()) == 3
            compiled.append([run._cache_size() for run in (pipeline.run_entry, pipeline.run_part, pipeline.run_exit)])
    assert [(own.slots, own.pages, own.snapshots) for own in rooms] == 2 * [(2, room.pages // 2, 2)]
    assert room.snapshots == 3 and compiled[0] == compiled[1] and all(compiled[0])


def test_settings_that_a_pipeline_does_not_have_are_refused():
    whole, pipeline = open_both("plain")
    for settings in ({"draft_tokens": 2}, {"adapters": 1}, {"half_batches_from": 8}):
        with pytest.raises(ConfigError, match=rf"served without engine\.{next(iter(settings))}; leave it out"):
            open_engine(pipeline, SETTINGS.model_copy(update=settings))
    with pytest.raises(ConfigError, match="served without a draft model"):
        open_engine(pipeline, SETTINGS, draft=whole)
