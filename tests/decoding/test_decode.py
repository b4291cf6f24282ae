"""Decoding: greedy equals the argmax of the full forward on any mesh, rows do not touch each other, seeds repeat."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.decoding.decode import DECODING_LAYOUT, cast_matrices
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.moe.router import MoEConfig
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, StepLayout, make_mesh, make_rules
from pallas_kernels import lowering_platform
from pallas_kernels.weight_only.packed import pack_two_of_four

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=48,
    layer_types=("sliding_attention", "full_attention"), sliding_window=6, initialization="fan_in",
    initializer_range=0.5, max_position_embeddings=100,
)  # fmt: skip
PROMPTS = [[5, 9, 2, 44, 17, 3, 8], [7], [30, 31, 32]]
GREEDY = Sampling(temperature=0)


def open_decoder(config: ModelConfig = CONFIG, layout: StepLayout = DECODING_LAYOUT, **degrees: int) -> Decoder:
    module = ModuleArrays(lambda rngs: Transformer(config, rngs))
    rules = make_rules(make_mesh(ParallelConfig(**degrees), jax.devices()[: math.prod(degrees.values())]))
    shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules), is_leaf=lambda x: isinstance(x, jax.P))
    params, non_params = module.init(jax.random.key(0))
    return Decoder(module, jax.device_put(params, shardings), non_params, rules, layout=layout)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return open_decoder()


@pytest.fixture(scope="module")
def logits(decoder):
    """Of the full forward, for ids [1, T]."""
    model = decoder.module.merge(decoder.params, decoder.non_params)
    forward = nnx.jit(lambda model, ids: model(ids))
    return lambda ids: forward(model, np.array([ids], np.int32))[0]


def run(decoder: Decoder, prompts, tokens: int, sampling: Sampling, seed=0) -> list[list[int]]:
    return np.stack(list(decoder.generate(prompts, tokens, sampling, seed=seed)), 1).tolist()


def compiled_programs(decoder: Decoder) -> int:
    assert decoder._engines
    return decoder._engines[0].programs.compiled


@pytest.fixture(scope="module")
def greedy(decoder) -> list[list[int]]:
    return run(decoder, PROMPTS, 12, GREEDY)


def test_replicas_have_variables_of_a_single_device_on_all_of_theirs():
    """A module's variables that are no parameters are made on one device, whichever mesh the parameters have."""
    decoder = open_decoder(data=2, tensor=2)
    decoder.non_params = {"scale": jax.numpy.arange(3)}
    for replica in decoder.split_replicas():
        found = replica.non_params["scale"]
        assert found.sharding.device_set == {*replica.rules.mesh.devices.flat} and found.tolist() == [0, 1, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("degrees", [{"data": 1}, {"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}])
def test_joined_projections_give_the_same_tokens(greedy, degrees):
    """On a CPU the sums over `tensor` are XLA's, in the place of the kernel."""
    decoder = open_decoder(layout=StepLayout(peer_sums="always"), **degrees)
    decoder.join_projections()
    decoder.join_projections()  # changes nothing
    names = decoder.params["decoder"]["layers"]["0"]["attention"].keys()
    assert "qkv_proj" in names
    assert run(decoder, PROMPTS, 12, GREEDY) == greedy


def test_latents_give_the_same_tokens_on_several_devices():
    """Each device has the latents of all tokens, and attends to them with its own heads."""
    latent = {
        "name": "latent", "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    }  # fmt: skip
    config = ModelConfig(
        vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, head_dim=12, intermediate_size=48, attention=latent,
        initialization="fan_in", initializer_range=0.5, max_position_embeddings=100,
    )  # fmt: skip
    decoder = open_decoder(config)
    alone = run(decoder, PROMPTS, 8, GREEDY)
    model = decoder.module.merge(decoder.params, decoder.non_params)
    ids = PROMPTS[0] + alone[0]
    wanted = np.argmax(nnx.jit(lambda model, ids: model(ids))(model, np.array([ids], np.int32))[0], -1)
    assert alone[0] == wanted[len(PROMPTS[0]) - 1 : -1].tolist()
    for degrees in ({"tensor": 2}, {"data": 2, "tensor": 2}):
        assert run(open_decoder(config, **degrees), PROMPTS, 8, GREEDY) == alone, degrees


def test_greedy_is_the_argmax_of_the_full_forward(logits, greedy):
    for prompt, found in zip(PROMPTS, greedy, strict=True):
        wanted = np.argmax(logits(prompt + found), -1)[len(prompt) - 1 : -1]
        assert found == wanted.tolist()


def test_several_steps_of_one_program_give_the_tokens_of_single_steps(decoder, greedy):
    """Also where the last program computes more tokens than are wanted, or the rows end within one."""
    several = Decoder(decoder.module, decoder.params, decoder.non_params, decoder.rules, steps=5)
    for count in (1, 4, 12):
        assert run(several, PROMPTS, count, GREEDY) == [row[:count] for row in greedy], count
    sampling = Sampling(temperature=1.0, top_k=30)
    assert run(several, PROMPTS, 12, sampling, seed=3) == run(decoder, PROMPTS, 12, sampling, seed=3)
    stop = greedy[0][6]
    alone = [int(token) for (token,) in several.generate(PROMPTS[:1], 12, GREEDY, stop_tokens=[stop])]
    assert alone == greedy[0][: greedy[0].index(stop) + 1]


def test_a_program_of_several_steps_is_compiled_for_each_way_of_sampling_and_any_number_of_steps(decoder):
    several = Decoder(decoder.module, decoder.params, decoder.non_params, decoder.rules, steps=5)
    for count, sampling in ((12, GREEDY), (4, GREEDY), (9, Sampling(temperature=1.0)), (12, Sampling(1.0, top_p=0.5))):
        run(several, PROMPTS, count, sampling)
    assert compiled_programs(several) == 7, "prompts, three ways to sample after them, and in each several steps"


def test_a_lone_row_gets_a_second_one_on_a_gpu(decoder):
    assert [decoder._room(n, 5, 5).slots for n in (1, 2, 3)] == [1, 2, 3]
    with lowering_platform("cuda"):
        assert [decoder._room(n, 5, 5).slots for n in (1, 2, 3)] == [2, 2, 3]


def test_unloading_frees_the_cache_and_loading_compiles_nothing(decoder, greedy):
    """As between the evaluations of a run, also on a slow model: the number of steps does not depend on times."""
    several = Decoder(decoder.module, decoder.params, decoder.non_params, decoder.rules, steps=3)
    run(several, PROMPTS, 12, GREEDY)
    engine = several._engines[0]
    engine._runner._step_seconds[False] = 1.0
    cache = jax.tree.leaves(engine.programs._pages)
    several.unload()
    assert cache and all(x.is_deleted() for x in cache)
    several.load(decoder.params, decoder.non_params)
    compiled = compiled_programs(several)
    assert run(several, PROMPTS, 12, GREEDY) == greedy
    assert compiled_programs(several) == compiled and engine._runner.most_steps == 3


def test_a_batch_that_the_caller_leaves_early_frees_its_rows(decoder, greedy):
    rows = decoder.generate(PROMPTS, 12, GREEDY)
    assert next(rows).tolist() == [row[0] for row in greedy]
    rows.close()
    assert decoder._engines[0].running == decoder._engines[0].waiting == decoder._engines[0].pool.used == 0
    assert run(decoder, PROMPTS, 12, GREEDY) == greedy


def test_a_row_does_not_depend_on_the_others(decoder, greedy):
    assert run(decoder, [PROMPTS[2], PROMPTS[0], PROMPTS[1]], 12, GREEDY) == [greedy[2], greedy[0], greedy[1]]


@pytest.mark.parametrize(
    "degrees", [{"tensor": 4, "fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"data": 8}], ids=str
)
def test_eight_devices_give_the_same_text(greedy, degrees):
    """With more devices along `tensor` than key/value heads, and more along `data` than rows, too."""
    assert run(open_decoder(**degrees), PROMPTS, 12, GREEDY) == greedy


def test_experts_on_several_devices_give_the_same_text():
    moe = MoEConfig(num_experts=4, num_experts_per_tok=2, exchange_factor=1.0)
    config = CONFIG.model_copy(update={"moe": moe, "num_layers": 2, "layer_types": ("full_attention",)})
    assert run(open_decoder(config, expert=4), PROMPTS, 6, GREEDY) == run(open_decoder(config), PROMPTS, 6, GREEDY)


@pytest.mark.quick
def test_values_that_a_packed_weight_holds_as_they_are_get_the_compute_dtype():
    config = CONFIG.model_copy(update={"scan_layers": False})
    module = ModuleArrays(lambda rngs: Transformer(config, rngs, dtype=jnp.bfloat16))
    rules = make_rules(make_mesh(ParallelConfig(), jax.devices()[:1]))

    def cast(key: jax.Array):
        params, _ = module.init(key)
        mlp = params["decoder"]["layers"]["0"]["mlp"]
        mlp["up_proj"]["kernel"] = pack_two_of_four(mlp["up_proj"]["kernel"].T)
        return cast_matrices(module, params, rules)["decoder"]["layers"]["0"]["mlp"]

    found = jax.eval_shape(cast, jax.random.key(0))
    assert found["down_proj"]["kernel"].dtype == jnp.bfloat16
    dtypes = {name: array.dtype for name, array in found["up_proj"]["kernel"].arrays.items()}
    assert dtypes == {"values": jnp.bfloat16, "kept": jnp.uint4}


def test_a_mesh_that_splits_sequences_is_refused():
    with pytest.raises(ConfigError, match="found context 2"):
        open_decoder(context=2)


def test_the_same_seed_gives_the_same_text(decoder):
    sampling = Sampling(temperature=1.0, top_k=30)
    first = run(decoder, PROMPTS, 12, sampling, seed=3)
    assert first == run(decoder, PROMPTS, 12, sampling, seed=3) != run(decoder, PROMPTS, 12, sampling, seed=4)
    equal = run(decoder, [PROMPTS[0]] * 3, 12, sampling)
    assert equal[0] != equal[1], "rows draw apart"


def test_a_draw_depends_on_its_own_prompt_and_seed_alone(decoder):
    sampling = Sampling(temperature=1.0, top_p=0.95)
    together = run(decoder, PROMPTS, 12, sampling, seed=[7, 8, 9])
    assert together == run(decoder, PROMPTS, 12, sampling, seed=7)
    for prompt, seed, found in zip(PROMPTS, (7, 8, 9), together, strict=True):
        assert run(decoder, [prompt], 12, sampling, seed=seed) == [found]


def test_a_row_ends_with_a_stop_token_and_all_rows_end_it(decoder, greedy):
    stop = greedy[0][4]
    steps = list(decoder.generate(PROMPTS, 12, GREEDY, stop_tokens=[stop]))
    for row, whole in enumerate(greedy):
        found = [int(tokens[row]) for tokens in steps]
        end = whole.index(stop) + 1 if stop in whole else 12
        assert found == (whole[:end] + [-1] * 12)[: len(steps)]
    alone = list(decoder.generate(PROMPTS[:1], 12, GREEDY, stop_tokens=[stop]))
    assert [int(tokens[0]) for tokens in alone] == greedy[0][: greedy[0].index(stop) + 1]


def test_ids_beyond_the_tokenizer_are_not_drawn(decoder):
    few = Decoder(decoder.module, decoder.params, decoder.non_params, decoder.rules, vocab_size=20)
    assert np.max(run(few, PROMPTS, 12, Sampling(temperature=3.0))) < 20
    assert np.max(run(decoder, PROMPTS, 12, Sampling(temperature=3.0))) >= 20


def test_prefill_and_step_are_compiled_once_for_prompts_of_any_length_in_a_block(decoder):
    sizes = []
    for length in (3, 17, 60):
        run(decoder, [[1] * length], 5, GREEDY)
        sizes.append(compiled_programs(decoder))
    assert sizes[0] == sizes[1] == sizes[2]


def test_a_prompt_beyond_a_block_is_padded_further(decoder, logits):
    long = np.random.default_rng(0).integers(0, 61, 70).tolist()
    assert run(decoder, [long], 2, GREEDY)[0][0] == int(np.argmax(logits(long)[-1]))


def test_what_does_not_fit_is_refused(decoder):
    with pytest.raises(ConfigError, match="at most 30 new tokens fit"):
        run(decoder, [[1] * 70], 31, GREEDY)
    with pytest.raises(ConfigError, match="a prompt of 120 tokens leaves no room in the model's context of 100"):
        run(decoder, [[1] * 120], 1, GREEDY)
    with pytest.raises(ConfigError, match="token id 61 is outside of the model's vocabulary of 61"):
        run(decoder, [[1, 61]], 1, GREEDY)
    for empty in ([], [[]], [[1], []]):
        with pytest.raises(ConfigError, match="at least one token"):
            run(decoder, empty, 3, GREEDY)
