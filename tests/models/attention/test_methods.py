"""The attention kinds of a model: causal, packed, decoded as trained, counted and refused."""

from typing import get_args

import jax
import numpy as np
import pytest
from flax import nnx

from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer, count_parameters, model_flops_per_token
from jaxstack.models.attention import ATTENTION_KINDS, AnyAttention
from jaxstack.models.attention.block_sparse import (
    BigBirdPattern,
    BlockSparseAttention,
    FixedPattern,
    StridedPattern,
)
from jaxstack.models.attention.gated import GatedAttention
from jaxstack.models.attention.gemma import GemmaAttention
from jaxstack.models.attention.latent import LatentAttention
from jaxstack.models.attention.linear import LinearAttention
from jaxstack.models.attention.longformer import LongformerAttention
from jaxstack.models.attention.performer import PerformerAttention
from jaxstack.models.attention.projected import ProjectedAttention
from jaxstack.models.attention.softmax import SoftmaxAttention
from jaxstack.models.attention.sparse_latent import SparseLatentAttention
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from jaxstack.run_config import load_config

KINDS = {
    "softmax": SoftmaxAttention(),
    "sinks": SoftmaxAttention(sinks=True),
    "gated": GatedAttention(),
    "latent": LatentAttention(q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6),
    "sparse_latent": SparseLatentAttention(
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        index_topk=9,
        index_n_heads=16,
        index_head_dim=6,
    ),
    "gemma4": GemmaAttention(global_head_dim=12, num_global_kv_heads=1, attention_k_eq_v=True),
    "longformer": LongformerAttention(window=4, global_tokens=2),
    "block_sparse": BlockSparseAttention(
        pattern=BigBirdPattern(window=1, global_blocks=1, random_blocks=0), block_size=16
    ),
    "linear": LinearAttention(),
    "performer": PerformerAttention(features=24),
    "projected": ProjectedAttention(block_size=8, summaries=3),
}
AS_IF_ALONE = ("softmax", "sinks", "gated", "latent", "sparse_latent", "gemma4", "longformer", "linear", "performer")
B = 2
T = 40


def build(kind: str, **values) -> Transformer:
    heads = {"num_kv_heads": 4, "head_dim": 12} if "latent" in kind else {"num_kv_heads": 2}
    heads |= {"qk_norm": True} if kind == "gemma4" else {}
    return Transformer(
        ModelConfig(
            vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48,
            initialization="fan_in", initializer_range=0.5, attention=KINDS[kind], **heads, **values,
        ),
        nnx.Rngs(0),
    )  # fmt: skip


@nnx.jit
def forward(model: Transformer, tokens, positions=None, segment_ids=None):
    return model(tokens, positions=positions, segment_ids=segment_ids)


@pytest.fixture(scope="module")
def models() -> dict[str, Transformer]:
    return {kind: build(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 61, (B, T)).astype(np.int32)


def close(a, b, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def test_the_table_and_the_union_hold_the_same_kinds():
    assert get_args(get_args(AnyAttention)[0]) == ATTENTION_KINDS
    assert {kind.model_fields["name"].default for kind in ATTENTION_KINDS} == {kind.name for kind in KINDS.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_changes_nothing_before_it(models, tokens, kind):
    other = tokens.copy()
    other[:, 20] = (other[:, 20] + 1) % 61
    first = forward(models[kind], tokens)
    second = forward(models[kind], other)
    close(first[:, :20], second[:, :20], 1e-6)
    assert np.abs(first[:, 20:] - second[:, 20:]).max() > 1e-3


def test_kinds_differ(models, tokens):
    outputs = [np.asarray(forward(models[kind], tokens)) for kind in KINDS]
    assert all(np.abs(a - b).max() > 1e-2 for i, a in enumerate(outputs) for b in outputs[:i])


LENGTHS = (13, 20, 7)


def packed() -> tuple[np.ndarray, np.ndarray]:
    segments = np.repeat([1, 2, 3], LENGTHS)[None].repeat(B, 0).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in LENGTHS])[None].repeat(B, 0).astype(np.int32)
    return segments, positions


@pytest.mark.parametrize("kind", AS_IF_ALONE)
def test_packed_documents_are_as_if_alone(models, tokens, kind):
    segments, positions = packed()
    together = forward(models[kind], tokens, positions, segments)
    start = 0
    for length in LENGTHS:
        close(together[:, start : start + length], forward(models[kind], tokens[:, start : start + length]))
        start += length
    assert np.abs(together - forward(models[kind], tokens)).max() > 1e-2


def test_a_layout_lies_over_the_row_and_hides_other_documents(models, tokens):
    segments, positions = packed()
    first = forward(models["block_sparse"], tokens, positions, segments)
    other = tokens.copy()
    other[:, :13] = (other[:, :13] + 1) % 61
    second = forward(models["block_sparse"], other, positions, segments)
    close(first[:, 13:], second[:, 13:], 1e-6)
    assert np.abs(first[:, :13] - second[:, :13]).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_equals_the_full_forward(models, tokens, kind):
    """A prompt padded at the left, some tokens together, then one at a time; each row as if alone and unpadded."""
    model = models[kind]
    lengths = [17, 5]
    width = 17
    prompt = np.zeros((B, width), np.int32)
    positions = np.full((B, width), -1, np.int32)
    for row, length in enumerate(lengths):
        prompt[row, width - length :] = tokens[row, :length]
        positions[row, width - length :] = np.arange(length)
    step = nnx.jit(lambda model, *arguments: model.decode(*arguments))
    logits, cache = step(model, prompt, positions, model.make_cache(B, T))
    found = [[np.asarray(logits[row, -1])] for row in range(B)]
    done = 0
    for count in (4, 1, 1, 1):
        at = np.array([length + done + np.arange(count) for length in lengths], np.int32)
        logits, cache = step(model, np.take_along_axis(tokens, at, 1), at, cache)
        for row in range(B):
            found[row].extend(np.asarray(logits[row]))
        done += count
    wanted = forward(model, tokens)
    for row, length in enumerate(lengths):
        close(np.stack(found[row]), wanted[row, length - 1 : length + done])


def test_a_recurrent_cache_does_not_grow():
    model = build("linear")
    sizes = [sum(x.size for x in model.make_cache(1, length).layers[0]) for length in (64, 4096)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kind", ["block_sparse", "performer"])
def test_the_decoder_takes_every_kind(kind):
    module = ModuleArrays(lambda rngs: build(kind))
    decoder = Decoder(module, *module.split(build(kind)), make_rules(make_mesh(ParallelConfig(), [jax.devices()[0]])))
    prompts = [[5, 9, 2, 44, 17, 3, 8] * 4, [7]]
    found = np.stack(list(decoder.generate(prompts, 6, Sampling(temperature=0))), 1).tolist()
    model = build(kind)
    for prompt, tokens in zip(prompts, found, strict=True):
        wanted = np.argmax(forward(model, np.array([prompt + tokens], np.int32)), -1)[0, len(prompt) - 1 : -1]
        assert tokens == wanted.tolist()


# --- FLOPs ------------------------------------------------------------------------------------------------------------


def attention_flops(kind, length: int) -> float:
    config = ModelConfig(vocab_size=64, num_layers=3, num_heads=4, num_kv_heads=2, attention=kind)
    return model_flops_per_token(config, length) - 6 * count_parameters(config).matmul


@pytest.mark.parametrize(
    ("kind", "sees"),
    [
        (LongformerAttention(window=20, global_tokens=7), lambda t, s: t - s < 20 or s < 7),
        (LongformerAttention(window=20, global_tokens=300), lambda t, s: True),
        (
            BlockSparseAttention(pattern=StridedPattern(local=2, stride=3), block_size=16),
            lambda t, s: t // 16 - s // 16 < 2 or (t // 16 - s // 16) % 3 == 0,
        ),
        (
            BlockSparseAttention(pattern=FixedPattern(stride=4, summary=1), block_size=16),
            lambda t, s: t // 64 == s // 64 or s // 16 % 4 == 3,
        ),
    ],
)
def test_flops_follow_the_visible_pairs(kind, sees):
    length = 300
    pairs = sum(sees(t, s) for t in range(length) for s in range(t + 1))
    # By convention a query counts itself as half a key.
    assert attention_flops(kind, length) == pytest.approx(3 * 12 * 256 * (pairs / length - 0.5), rel=0.03)


def test_flops_of_latent_attention_are_those_of_its_expanded_heads():
    """Scores of heads of 12 channels and sums of values of 6, for half of the keys; three times with the backward."""
    model = build("latent").config
    found = model_flops_per_token(model, 300) - 6 * count_parameters(model).matmul
    assert found == model.num_layers * 3 * 2 * 150 * 4 * (12 + 6)


def test_parameters_are_counted(models):
    for kind, model in models.items():
        sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
        assert sum(sizes) == count_parameters(model.config).total, kind


def test_flops_of_linear_kinds_do_not_depend_on_the_length():
    """A key is added to the state, a query multiplied with it: 2 x features x width each, times 3 with the backward."""
    linear = 3 * 3 * 2 * 64 * 64 * (4 + 2)
    assert attention_flops(LinearAttention(), 128) == attention_flops(LinearAttention(), 4096) == linear
    projections = 3 * 2 * 2 * 256 * 64 * (4 + 2)
    assert attention_flops(PerformerAttention(), 4096) == linear * 256 / 64 + projections


def test_a_full_layout_and_a_wide_window_count_as_softmax():
    full = attention_flops(SoftmaxAttention(), 320)
    assert attention_flops(LongformerAttention(window=400), 320) == full
    assert attention_flops(BlockSparseAttention(pattern=StridedPattern(stride=1), block_size=64), 320) == full


# --- configuration ----------------------------------------------------------------------------------------------------


LATENT = "model.attention={name: latent, qk_nope_head_dim: 16, qk_rope_head_dim: 8}"
GEMMA = "model={qk_norm: true, attention: {name: gemma4, global_head_dim: 24}}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.attention={name: linera}"], "model.attention.name cannot be 'linera'; did you mean 'linear'"),
        (["model.attention={window: 4}"], "choose one of: 'block_sparse', 'gated', 'gemma4', 'latent', 'linear'"),
        (
            ["model.attention={name: longformer, windw: 4}"],
            "unknown key 'model.attention.windw'; did you mean 'window'",
        ),
        (["model.attention={name: block_sparse, block_size: 20}"], "block_size: should be a multiple of 16; found 20"),
        (["model.attention={name: block_sparse, pattern: {name: fixed, stride: 2, summary: 3}}"], "must not exceed"),
        (["model.attention={name: linear}", "model.attn_logit_softcapping=5.0"], "needs attention.name softmax"),
        ([LATENT, "model.head_dim=24", "model.num_kv_heads=null", "model.qk_norm=true"], "qk_norm (True) is not"),
        ([LATENT, "model.head_dim=24", "model.num_kv_heads=null", "model.partial_rotary_factor=0.5"], "(0.5) is not"),
        ([LATENT, "model.head_dim=24", "model.num_kv_heads=null", "model.qkv_bias=true"], "qkv_bias is not supported"),
        ([LATENT, "model.head_dim=16"], "head_dim (16) must be qk_nope_head_dim + qk_rope_head_dim (24)"),
        (["model.attention={name: gemma4}"], "gemma4 needs qk_norm: true; found False"),
        (
            [GEMMA, "model.layer_types=[sliding_attention, full_attention]", "model.sliding_window=4"],
            "separate rotations",
        ),
        (["model.num_kv_shared_layers=2"], "num_kv_shared_layers (2) needs attention.name gemma4; found softmax"),
        ([GEMMA, "model.num_kv_shared_layers=4"], "num_kv_shared_layers (4) must be less than num_layers (4)"),
        ([GEMMA, "model.use_double_wide_mlp=true"], "use_double_wide_mlp needs num_kv_shared_layers"),
        ([GEMMA, "model.attention.num_global_kv_heads=3"], "must be divisible by attention.num_global_kv_heads (3)"),
        (["model.attention={name: linear}", "model.query_pre_attn_scalar=5.0"], "scales scores"),
        (
            ["model.attention={name: longformer}", "model.layer_types=[sliding_attention]", "model.sliding_window=4"],
            "sliding_attention needs attention.name softmax; found longformer",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_any_device_work(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert message in str(caught.value) and caught.value.exit_code == 2
