"""How many requests and pages fit into a device's memory, and what happens when it is used up nevertheless."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxstack.decoding import cache_room
from jaxstack.decoding.cache_room import cache_bytes
from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.engine import Engine
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.models import ModelConfig
from tests.serve.tiny import CONFIG, open_tiny

MEMORY = 4_000_000
LATENT = {"name": "latent", "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def model_on(devices: int, *, several_processes: bool = False) -> Any:
    mesh = SimpleNamespace(is_multi_process=several_processes)
    return SimpleNamespace(device_count=devices, memory_share=1.0, rules=SimpleNamespace(mesh=mesh))


def test_memory_that_other_programs_hold_is_not_usable(monkeypatch):
    monkeypatch.setattr(cache_room, "memory_per_device", lambda: MEMORY)
    monkeypatch.setattr(cache_room, "available_bytes", lambda devices: [None, 3 * MEMORY, MEMORY // 2])
    assert cache_room.usable_bytes(model_on(2)) == MEMORY
    monkeypatch.setattr(cache_room, "available_bytes", lambda devices: [None, 3 * MEMORY])
    assert cache_room.usable_bytes(model_on(2)) == 2 * MEMORY


def test_processes_that_run_a_model_together_count_with_the_same_memory(monkeypatch):
    """Otherwise the caches, and so the programs, of one mesh would have different shapes."""
    others = [MEMORY // 4, None]
    monkeypatch.setattr(cache_room, "memory_per_device", lambda: MEMORY)
    monkeypatch.setattr(cache_room, "all_gather", lambda name, own, seconds: [own, *others])
    assert cache_room.usable_bytes(model_on(4, several_processes=True)) == MEMORY
    assert cache_room.usable_bytes(model_on(4)) == 4 * MEMORY
    others[0] = 2 * MEMORY
    assert cache_room.usable_bytes(model_on(4, several_processes=True)) == 4 * MEMORY


@pytest.mark.longer
def test_more_requests_than_fit_are_refused_with_the_largest_number_that_fits(monkeypatch):
    monkeypatch.setattr(cache_room, "memory_per_device", lambda: MEMORY)
    model = open_tiny()
    with pytest.raises(ConfigError, match=r"engine\.slots\) take at least .* set engine\.slots to at most") as refused:
        cache_room.choose_room([model], EngineConfig(slots=2000))
    found = re.search(r"at most ([\d,]+)", str(refused.value))
    assert found is not None
    most = int(found[1].replace(",", ""))
    room = cache_room.choose_room([model], EngineConfig(slots=most))
    assert cache_bytes(model, room) + model.weight_bytes + most * 257 * 12 <= MEMORY
    with pytest.raises(ConfigError, match="set engine.slots to at most"):
        cache_room.choose_room([model], EngineConfig(slots=most + 5))


@pytest.mark.parametrize(
    ("tokens", "config", "expected"),
    [
        (600_000, EngineConfig(context=4096), 512),
        (512 * 1024, EngineConfig(context=4096), 512),
        (512 * 1024 - 1, EngineConfig(context=4096), 256),
        (40_000, EngineConfig(context=4096), 32),
        (40_000, EngineConfig(context=256), 128),
        (100, EngineConfig(context=4096), 16),
        (600_000, EngineConfig(context=131_072), 256),
        (600_000, EngineConfig(context=4096, pages=4096), 64),
        (600_000, EngineConfig(context=4096, slots=3), 3),
    ],
)
def test_requests_at_a_time_follow_from_the_memory_of_gpus(monkeypatch, tokens, config, expected):
    """With so many tokens in the cache of a GPU, 1,024 of each request; a CPU has 16 whatever its memory."""
    model = open_tiny(config=CONFIG.model_copy(update={"max_position_embeddings": None}))
    page = cache_room.cache_units([model], config, 1).page
    total = model.weight_bytes + tokens * page // config.page_size
    monkeypatch.setattr(cache_room, "memory_per_device", lambda: 2 * total + 2**30)
    monkeypatch.setattr(cache_room, "free_bytes", lambda models, config, units, total: tokens / 16 * units.page)
    assert cache_room.choose_room([model], config).slots == (config.slots or 16)
    monkeypatch.setattr(cache_room.jax, "default_backend", lambda: "gpu")
    assert cache_room.choose_room([model], config).slots == expected


@pytest.mark.parametrize("attention", [None, LATENT])
def test_what_every_device_holds_counts_for_each(monkeypatch, attention):
    """With latents, which tensor parallelism does not split, a cache of both devices' memory would not fit on one."""
    settings = CONFIG.model_dump() | (
        {} if attention is None else {"attention": attention, "num_kv_heads": None, "head_dim": 12}
    )
    config = ModelConfig.model_validate(settings)
    model = open_tiny(config=config, tensor=2)
    on_device = [_bytes_on(device, (model.params, model.non_params)) for device in jax.devices()[:2]]
    assert model.weight_bytes == sum(on_device)
    monkeypatch.setattr(cache_room, "memory_per_device", lambda: MEMORY)
    engine = Engine(model, EngineConfig(slots=200, page_size=8), vocab_size=257, warm_up=False, start=False)
    engine.programs.allocate()
    share = (0.9 * 2 * MEMORY - model.weight_bytes) / 4  # half, on a CPU, for each device
    for device in jax.devices()[:2]:
        used = _bytes_on(device, engine.programs._pages)
        assert 0.95 * share < used <= share


def _bytes_on(device, arrays) -> int:
    shards = [shard for x in jax.tree.leaves(arrays) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def test_few_requests_leave_the_cache_its_share(monkeypatch):
    model = open_tiny()
    monkeypatch.setattr(cache_room, "memory_per_device", lambda: model.weight_bytes + 500_000)
    room = cache_room.choose_room([model], EngineConfig(slots=16))
    used = cache_bytes(model, room)
    share = (0.9 * (model.weight_bytes + 500_000) - model.weight_bytes) / 2  # half, on a CPU
    assert share - cache_bytes(model, room._replace(pages=2)) <= used <= share


def test_an_engine_that_runs_out_of_memory_says_so_without_a_traceback(monkeypatch, caplog, capsys):
    with Engine(open_tiny(), EngineConfig(slots=2, page_size=8, chunk=64), vocab_size=257, warm_up=False) as engine:

        def exhausted() -> bool:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.")

        monkeypatch.setattr(engine, "step", exhausted)
        handle = engine.submit([1, 2], 5)
        with pytest.raises(JaxstackError, match="out of device memory: 16.00 GiB could not be allocated"):
            list(handle)
        assert engine._thread is not None
        engine._thread.join(10)
        assert engine.failure is not None and "Traceback" not in capsys.readouterr().err
        assert "lower engine.slots" in caplog.text
