"""Pipeline inference: the tokens of one device, weights and cache on the devices of their stages, which overlap."""

import itertools
import math
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.decoding import cache_room
from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decode import Scorer
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.pipeline import PipelineDecoder, split_stages, stage_shapes
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.load import read_parameters
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules

FIXTURES = Path(__file__).parents[1] / "models" / "huggingface"
PROMPTS = [[1, 2, 3, 4, 5], [7], [3, 9]]
SMALL = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=64, scan_layers=False
)


def rules_of(**degrees):
    parallel = ParallelConfig(**degrees)
    return make_rules(make_mesh(parallel, jax.devices()[: math.prod(parallel.degrees.values())]))


def split(module, params, **degrees) -> PipelineDecoder:
    stages = split_stages(rules_of(**degrees))
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, stage_shapes(module, stages))
    return PipelineDecoder(module, placed, {}, stages)


@pytest.fixture(scope="module")
def small():
    module = ModuleArrays(lambda rngs: Transformer(SMALL, rngs))
    return module, module.init(jax.random.key(0))[0]


def tokens(decoder: Decoder, sampling: Sampling, count: int = 6) -> np.ndarray:
    return np.stack(list(decoder.generate(PROMPTS, count, sampling, seed=3)))


@pytest.mark.parametrize("degrees", [{"pipeline": 2}, {"pipeline": 3}, {"pipeline": 2, "tensor": 2}], ids=str)
@pytest.mark.longer
def test_tokens_are_those_of_one_device(small, degrees):
    module, params = small
    whole = Decoder(module, params, {}, rules_of())
    pipeline = split(module, params, **degrees)
    for sampling in (Sampling(0), Sampling(1.0, top_p=0.9)):
        assert np.array_equal(tokens(pipeline, sampling), tokens(whole, sampling))
    assert len(pipeline._engines) == degrees["pipeline"]
    one, other = (next(decoder.generate(PROMPTS[:1], 1, Sampling(0))) for decoder in (pipeline, whole))
    assert np.array_equal(one, other), "fewer rows than stages"


@pytest.mark.parametrize("family", ["gemma3", "qwen3-moe", "gpt2", "llama"])
@pytest.mark.exhaustive
def test_tokens_of_families_are_those_of_one_device(family):
    """Tied and untied heads, windows, learned positions, experts."""
    config = read_model_config(FIXTURES / family).model_copy(update={"scan_layers": False})
    module = ModuleArrays(lambda rngs: Transformer(config, rngs, dtype=jnp.float32))
    shardings = jax.tree.map(rules_of().sharding, module.parameter_specs(rules_of()))
    params = read_parameters(FIXTURES / family, config, shardings)
    whole = Decoder(module, params, {}, rules_of())
    pipeline = split(module, params, pipeline=2)
    assert np.array_equal(tokens(pipeline, Sampling(0.5)), tokens(whole, Sampling(0.5)))


def bytes_on(tree) -> Counter:
    """The bytes on each device."""
    found = Counter()
    for x in jax.tree.leaves(tree):
        for shard in x.addressable_shards:
            found[shard.device.id] += shard.data.nbytes
    return found


@pytest.mark.longer
@pytest.mark.parametrize("tied", [False, True])
def test_each_device_has_the_weights_and_the_cache_of_its_layers(tied):
    """Of three layers the first stage has two. The cache of a layer is keys and values, 2 heads of 8, of all pages."""
    config = SMALL.model_copy(update={"tie_word_embeddings": tied})
    module = ModuleArrays(lambda rngs: Transformer(config, rngs))
    pipeline = split(module, module.init(jax.random.key(0))[0], pipeline=2)
    layer = 4 * (32 * (4 + 2 + 2 + 4) * 8 + 3 * 32 * 64 + 2 * 32)
    table = 4 * 61 * 32
    weights = {0: 2 * layer + table, 1: layer + table + 4 * 32}
    assert bytes_on((pipeline.params, pipeline._head if tied else ())) == weights
    assert pipeline.weight_bytes == sum(weights.values())
    assert pipeline.memory_share == min(3 / 2 / 2, sum(weights.values()) / 2 / weights[0])
    tokens(pipeline, Sampling(0))
    pages = bytes_on([engine.programs._pages for engine in pipeline._engines])
    page_bytes = sum(engine.programs.room.pages for engine in pipeline._engines) * 16 * 2 * 2 * 8 * 4
    assert pages == {0: 2 * page_bytes, 1: page_bytes}
    assert pipeline.cache_bytes([5, 1, 2], 6) == sum(pages.values())
    pipeline.unload()
    assert all(x.is_deleted() for engine in pipeline._engines for x in jax.tree.leaves(engine.programs._pages))


@pytest.mark.longer
def test_the_fullest_stage_limits_the_pages(monkeypatch):
    """Of three layers the first stage has two, and the embedding matrix: its device must not overflow."""
    module = ModuleArrays(lambda rngs: Transformer(SMALL, rngs))
    pipeline = split(module, module.init(jax.random.key(0))[0], pipeline=2)
    memory = 2 * pipeline.weight_bytes
    monkeypatch.setattr(cache_room, "memory_per_device", lambda: memory)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # on a CPU half of the memory is for programs
    config = EngineConfig(slots=4, page_size=16, context=64_000, memory_fraction=1.0)
    room = cache_room.choose_room([pipeline], config)
    page = 16 * 2 * 2 * 8 * 4  # of one layer
    filled = bytes_on(pipeline.params)[0] + room.pages * 2 * page
    assert room.pages < 16_000 and 0.9 * memory < filled <= memory


def intervals(directory: Path) -> dict[int, list[tuple[float, float]]]:
    """From a profile, when the programs of layers ran on each device: (begin, end) in nanoseconds, in order."""
    (file,) = directory.glob("**/*.xplane.pb")
    times: dict[tuple[int, int], list[float]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for event in (event for line in plane.lines for event in line.events):
            said = dict(event.stats)
            if said.get("hlo_module") == "jit__part_step":
                run = times.setdefault((int(said["device_ordinal"]), int(said["run_id"])), [])
                run += [event.start_ns, event.start_ns + event.duration_ns]
    found: dict[int, list[tuple[float, float]]] = {}
    for (device, _), moments in times.items():
        found.setdefault(device, []).append((min(moments), max(moments)))
    return {device: sorted(spans) for device, spans in found.items()}


@pytest.mark.longer
@pytest.mark.filterwarnings("ignore:builtin type event_stats has no __module__ attribute")
def test_the_stages_compute_at_the_same_time_if_there_are_several_groups_of_rows(tmp_path):
    """With one group they never do. How often with two depends on how busy the host is."""
    config = SMALL.model_copy(update={"hidden_size": 512, "num_layers": 4, "intermediate_size": 2048})
    module = ModuleArrays(lambda rngs: Transformer(config, rngs))
    pipeline = split(module, module.init(jax.random.key(0))[0], pipeline=2)
    overlaps = {}
    for groups in (1, 2):
        pipeline.groups = groups
        tokens(pipeline, Sampling(0))  # compiles
        with jax.profiler.trace(str(tmp_path / str(groups))):
            tokens(pipeline, Sampling(0), 12)
        spans = intervals(tmp_path / str(groups))
        assert {device: len(runs) for device, runs in spans.items()} == dict.fromkeys((0, 1), 12 * groups)
        pairs = itertools.product(spans[0], spans[1])
        overlaps[groups] = sum(max(one[0], other[0]) < min(one[1], other[1]) for one, other in pairs)
    assert overlaps[1] == 0 and overlaps[2] >= 1


def test_what_needs_the_whole_model_in_one_program_is_refused(small):
    module, params = small
    pipeline = split(module, params, pipeline=2)
    for use in (lambda: Scorer(pipeline, 1), lambda: pipeline.logits(np.array([[1]])), lambda: Engine(pipeline)):
        with pytest.raises(ConfigError, match=r"set parallel.pipeline=1"):
            use()


def test_layouts_that_a_pipeline_does_not_have_are_refused(small):
    with pytest.raises(ConfigError, match=r"tensor only; found data 2: set it to 1"):
        split_stages(rules_of(pipeline=2, data=2))
    with pytest.raises(ConfigError, match=r"must not exceed the number of layers; set it to at most 3"):
        split(*small, pipeline=4)
