"""Generation with a window of layers in memory: the same tokens, and no more bytes than the window and the cache."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.layer_window import WeightWindow, WindowDecoder
from jaxstack.decoding.sampling import Sampling
from jaxstack.models import ModelConfig, Transformer, to_huggingface
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.load import ModelParts, read_parameters
from jaxstack.models.layer import CacheRoom
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules

FIXTURES = Path(__file__).parents[1] / "models" / "huggingface"


def open_both(directory: Path, resident: int, dtype=jnp.float32, place="files") -> tuple[Decoder, WindowDecoder]:
    """The model of a directory, whole and with a window of layers."""
    config = read_model_config(directory).model_copy(update={"scan_layers": False})
    module = ModuleArrays(lambda rngs: Transformer(config, rngs, dtype=dtype))
    rules = make_rules(make_mesh(ParallelConfig(), jax.devices()[:1]))
    shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
    non_params = jax.jit(lambda key: module.init(key)[1])(jax.random.key(0))
    whole = Decoder(module, read_parameters(directory, config, shardings), non_params, rules)
    options = {"resident": resident, "place": place}
    return whole, WindowDecoder(module, ModelParts(directory, config), non_params, rules, **options)


def tokens(decoder: Decoder, sampling: Sampling, count: int = 6) -> np.ndarray:
    prompts = [[1, 2, 3, 4, 5], [7], [3, 9]]
    return np.stack(list(decoder.generate(prompts, count, sampling, seed=3)))


@pytest.mark.parametrize(
    ("size", "turns"), [(1, [0, 1, 2, 3, 4]), (2, [0, 1, 2, 3, 4]), (3, [0, 1, 2, 3]), (4, [0, 1, 3]), (5, []), (9, [])]
)
def test_some_parts_are_kept_and_the_others_read_in_turns(size, turns):
    live = set()
    read = []

    class Weight:
        def __init__(self, number):
            self.number = number
            live.add(self)
            read.append(number)
            most.append(len(live))

        def delete(self):
            live.remove(self)

    most = []
    window = WeightWindow(5, size, lambda number: {"w": Weight(number)})
    for use in range(15):
        assert window.take(use % 5)["w"].number == use % 5
        window.release(use % 5, jnp.zeros(()))
    window.close()
    assert max(most) <= size and window.turns == turns
    assert all(3 <= read.count(number) <= 4 if number in turns else read.count(number) == 1 for number in range(5))


def test_a_failed_read_is_raised_where_the_weights_are_used():
    def read(number):
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        WeightWindow(2, 1, read).take(0)


@pytest.mark.parametrize(
    ("family", "place", "resident"),
    [
        ("gemma3", "files", 2),
        ("gemma3", "host", 3),
        ("qwen3-moe", "peers", 2),
        ("gpt2", "host", 1),
        ("llama", "files", 2),
    ],
)
@pytest.mark.parametrize("sampling", [Sampling(0), Sampling(1.0, top_p=0.9)])
@pytest.mark.exhaustive
def test_tokens_are_those_of_the_whole_model(family, place, resident, sampling):
    """Tied and untied heads, windows, learned positions, experts."""
    whole, window = open_both(FIXTURES / family, resident, place=place)
    assert np.array_equal(tokens(window, sampling), tokens(whole, sampling))
    window.unload()


@pytest.mark.parametrize("place", ["host", "peers"])
@pytest.mark.longer
def test_each_memory_has_the_layers_that_it_is_to_have(place):
    """Of four layers and the head 2 are kept, and 3 in turns: one on each of three other devices, or in the host."""
    _, window = open_both(FIXTURES / "gemma3", 4, place=place)
    tokens(window, Sampling(0))
    turns = [0, 1, 3]
    assert window.window.turns == turns and sorted(window._pool) == turns
    layers = window.params["decoder"]["layers"]
    size = {number: sum(x.size * 4 for x in jax.tree.leaves(layers[str(number)])) for number in turns}
    found = {number: sum(x.nbytes for x in jax.tree.leaves(part)) for number, part in window._pool.items()}
    assert found == size and window.pool_bytes == sum(size.values())
    kinds = {x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(window._pool)}
    assert kinds == {place == "host"}
    devices = [{d.id for x in jax.tree.leaves(window._pool[number]) for d in x.devices()} for number in turns]
    assert devices == ([{1}, {2}, {3}] if place == "peers" else [{0}] * 3)
    resident = [x for part in window.window._parts.values() for x in jax.tree.leaves(part.result())]
    assert all(x.devices() == {jax.devices()[0]} for x in resident)
    assert window.window_bytes == window.total_bytes - sum(size.values()) + sum(sorted(size.values())[-2:])
    window.unload()


@pytest.mark.exhaustive
def test_live_bytes_are_at_most_those_of_the_window_and_the_cache(tmp_path, monkeypatch):
    """Two of 40 layers are held, which takes at most a tenth of the memory, the cache included."""
    sizes = {"hidden_size": 128, "num_layers": 40, "num_heads": 4, "num_kv_heads": 1, "intermediate_size": 512}
    config = ModelConfig(vocab_size=61, **sizes)
    model = ModuleArrays(lambda rngs: Transformer(config, rngs))
    to_huggingface(model.merge(*model.init(jax.random.key(0))), tmp_path)
    _, window = open_both(tmp_path, resident=2, dtype=jnp.bfloat16)
    del model
    before = {id(x) for x in jax.live_arrays()}
    live = []
    take = window.window.take

    def watched(number):
        taken = take(number)
        arrays = [x for x in jax.live_arrays() if id(x) not in before and (x.shape, x.dtype) in kinds]
        # While the other thread places weights on the device, several arrays may share a buffer.
        live.append(sum({x.unsafe_buffer_pointer(): x.nbytes for x in arrays}.values()))
        return taken

    monkeypatch.setattr(window.window, "take", watched)
    cache = jax.eval_shape(lambda: window.merge({}).make_shared_cache(CacheRoom(1, 128, 8, 16)))
    # Threads that earlier tests of this process left may hold arrays of other models meanwhile.
    kinds = {(x.shape, x.dtype) for x in jax.tree.leaves((window.params, cache))}
    list(window.generate([[1, 2, 3]], 3, Sampling(0)))
    allowed = window.window_bytes + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) + 64 * 128 * 2 + 4096
    assert 0 < max(live) <= allowed and max(live) <= window.total_bytes / 10
    window.unload()
