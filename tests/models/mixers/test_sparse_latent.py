"""The indexer of sparse latent attention: its loss against a plain reference, what it trains, and in every layout."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax, softmax, xlogy

from jaxstack.loss import language_model_loss
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.attention.sparse_latent import SparseLatentAttention
from jaxstack.models.layer import CacheAndSums, Context
from jaxstack.models.mixers import sparse_latent_attention
from jaxstack.models.mixers.sparse_latent_attention import SparseMultiHeadLatentAttention
from jaxstack.parameter_paths import flatten, path_name
from jaxstack.trainer import Trainer
from tests.marks import longer
from tests.small_runs import batch_at, make_trainer, metrics_of_steps, small_config

B = 2
T = 16
D = 32
WIDTHS = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
INDEX = {"index_n_heads": 16, "index_head_dim": 6}
STAGES = {"dense": T, "sparse": 5}
"""Keys that a query sees."""


def config_of(topk: int, **own) -> ModelConfig:
    return ModelConfig(
        vocab_size=64, hidden_size=D, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=12, intermediate_size=48,
        initialization="fan_in", initializer_range=0.5,
        attention=SparseLatentAttention(**WIDTHS, **INDEX, index_topk=topk, **own),
    )  # fmt: skip


@functools.cache
def mixer_of(topk: int) -> SparseMultiHeadLatentAttention:
    config = config_of(topk)
    return SparseMultiHeadLatentAttention(config, dataclasses.replace(config.layers()[0], rotation=None), nnx.Rngs(0))


def context_of(ids: jax.Array | None) -> Context:
    return Context(jnp.arange(T)[None], {}, ids, None, True, with_losses=True)


def inputs() -> tuple[jax.Array, np.ndarray]:
    """The input of the mixer, and packed documents."""
    return jax.random.normal(jax.random.key(1), (B, T, D)), batch_at(0, B, T)["segment_ids"]


def by_path(tree) -> dict[str, jax.Array]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def divergences(index, q, k, scale: float, topk: int, ids: np.ndarray) -> np.ndarray:
    """KL divergence of each query's scores from its attention, [B, T], by NumPy in float64."""
    q, k, queries, weights, keys = (np.asarray(x, np.float64) for x in (q, k, *index))
    scores = (np.maximum(np.einsum("btij,bsj->btis", queries, keys), 0) * weights[..., None]).sum(2)
    found = np.zeros(ids.shape)
    for b, t in np.ndindex(*ids.shape):
        seen = np.array([s for s in range(t + 1) if ids[b, s] == ids[b, t]])
        seen = seen[np.argsort(-scores[b, t, seen], kind="stable")[:topk]]
        target = softmax(np.einsum("nh,snh->ns", q[b, t], k[b, seen]) * scale, axis=-1).sum(0)
        target /= target.sum()
        found[b, t] = (xlogy(target, target) - target * log_softmax(scores[b, t, seen])).sum()
    return found


@pytest.mark.parametrize("stage", ["sparse", *longer("dense")])
def test_the_loss_is_the_divergence_from_the_attention_of_the_heads(stage, monkeypatch):
    """Of packed documents, in chunks of three queries, the last of which is smaller."""
    monkeypatch.setattr(sparse_latent_attention, "_CHUNK_BYTES", 4 * B * 4 * T * 3)
    topk = STAGES[stage]
    x, ids = inputs()

    @nnx.jit
    def run(mixer: SparseMultiHeadLatentAttention, x: jax.Array, ids: jax.Array):
        context = context_of(ids)
        q, latent, low = mixer._project(x, context)
        index = mixer._index(x, low, context)
        return index, q, mixer._expand(latent)[0], mixer(x, context)[1].sums

    index, q, k, sums = run(mixer_of(topk), x, jnp.asarray(ids))
    wanted = divergences(index, q, k, mixer_of(topk).scale, topk, ids)
    own = sums["indexer_loss"]
    assert wanted.min() > -1e-9 and wanted.max() > 0.1
    np.testing.assert_allclose(own.total, wanted.sum(), rtol=1e-6)
    np.testing.assert_allclose(own.loss, 0.01 * wanted.sum(), rtol=1e-6)
    np.testing.assert_allclose(own.metrics("indexer_loss")["indexer_loss"], wanted.mean(), rtol=1e-6)


@pytest.mark.longer
@pytest.mark.parametrize("stage", ["sparse", *longer("dense")])
def test_the_loss_has_gradients_of_the_indexer_alone_and_nothing_else_has_them(stage):
    graphdef, params = nnx.split(mixer_of(STAGES[stage]))
    x, _ = inputs()

    @jax.jit
    def gradients(params, x):
        def both(params, x):
            out, found = nnx.merge(graphdef, params)(x, context_of(None))
            assert isinstance(found, CacheAndSums)
            return jnp.sum(out**2), found.sums["indexer_loss"]

        pull = jax.vjp(both, params, x)[1]
        return [pull(seed) for seed in ((0.0, _loss_seed(1.0)), (1.0, _loss_seed(0.0)))]

    def _loss_seed(one: float):
        zero = jnp.zeros(())
        return sparse_latent_attention.auxiliary_loss(zero, 1.0, 1)._replace(loss=zero + one, tokens=zero)

    (own, own_x), (of_model, model_x) = gradients(params, x)
    assert not own_x.any() and model_x.any()
    own, of_model = by_path(own), by_path(of_model)
    for path in own:
        assert bool((own[path] != 0).any()) == ("indexer/" in path), path
        assert bool((of_model[path] != 0).any()) == ("indexer/" not in path), path


def test_only_training_has_the_loss_and_the_weight_0_leaves_it_out():
    """Traced only."""
    batch = {name: jnp.asarray(x) for name, x in batch_at(0, B, T).items()}

    def further(weight: float, train: bool) -> dict:
        def loss():
            model = Transformer(config_of(5, indexer_loss_weight=weight), nnx.Rngs(0))
            return language_model_loss(model, batch, train=train)

        return dict(jax.eval_shape(loss).further)

    assert list(further(0.1, True)) == ["indexer_loss"]
    assert not further(0.1, False) and not further(0, True)


def test_the_indexer_is_trained_except_beside_adapters():
    def is_trained(*overrides: str) -> bool:
        module = trainer_of(*overrides).module
        trained = module.split_frozen(module.abstract_params)[0]
        return ("indexer", "q_proj", "kernel") in {path[-3:] for path in flatten(trained)}

    adapters = "adapters.rules=[{path: q_b_proj, rank: 2}]"
    assert is_trained()
    assert not is_trained(adapters)
    assert is_trained(adapters, "optimizer.groups=[{path: indexer/, frozen: false}]")


def trainer_of(*overrides: str, topk: int = 5) -> Trainer:
    widths = ", ".join(f"{name}: {value}" for name, value in {**WIDTHS, **INDEX, "index_topk": topk}.items())
    attention = f"model.attention={{name: sparse_latent, {widths}, indexer_loss_weight: 0.5}}"
    # Larger weights than those of a real model, so that attention is not even.
    shape = ("model.head_dim=12", "model.initialization=fan_in", "model.initializer_range=1.0")
    return make_trainer(small_config("train.global_batch_size=8", "optimizer.eps=1e-4", attention, *shape, *overrides))


MIXTURE = "model.moe={num_experts: 4, moe_intermediate_size: 16, first_k_dense_replace: 1}"
LAYOUTS = {
    "fsdp, accumulation": ("parallel.data=2", "parallel.fsdp=2", "train.gradient_accumulation=2"),
    "tensor, remat": ("parallel.fsdp=2", "parallel.tensor=2", "parallel.sequence=true", "model.remat=full"),
    "zero": ("parallel.data=4", "parallel.zero=2", "model.remat=save_attention"),
    "pipeline": ("parallel.pipeline=2", "parallel.data=2"),
}


@functools.cache
def on_one_device(*shape: str) -> list[dict[str, float]]:
    return metrics_of_steps(trainer_of(*shape), 3)


@pytest.mark.longer
@pytest.mark.parametrize("shape", [(), (MIXTURE, "model.num_layers=5")], ids=["dense", "mixture behind a dense layer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_it_as_one_device_does(layout, shape):
    wanted = on_one_device(*shape)
    found = metrics_of_steps(trainer_of(*shape, *LAYOUTS[layout]), 3)
    for name in ("loss", "grad_norm", "indexer_loss"):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in wanted], rtol=1e-5, err_msg=name)
    assert wanted[-1]["indexer_loss"] < wanted[0]["indexer_loss"]


@pytest.mark.longer
def test_unrolled_layers_and_multi_token_prediction_have_the_loss():
    trainer = trainer_of("model.scan_layers=false", "model.num_nextn_predict_layers=1")
    before = by_path(jax.tree.map(np.asarray, trainer.state.params))
    metrics = metrics_of_steps(trainer, 3)
    after = by_path(trainer.state.params)
    moved = [path for path in after if "indexer/" in path and not np.array_equal(before[path], after[path])]
    assert any(path.startswith("mtp/") for path in moved) and len(moved) == 3 * 5
    assert all(m["indexer_loss"] > 0 for m in metrics)


def recall(trainer: Trainer, topk: int) -> float:
    """The share of each query's `topk` most attended keys that the indexer scores highest, in the first layer."""
    model = trainer.module.merge(trainer.state.params, trainer.state.non_params)
    batch = batch_at(0, 8, T)

    @nnx.jit
    def run(model: Transformer):
        x, context = model.inputs_of_layers(jnp.asarray(batch["tokens"]))
        layer = model.decoder.layers[0]
        x = layer.attention_norm(x)
        q, latent, low = layer.attention._project(x, context)
        index = layer.attention._index(x, low, context)
        k, _ = layer.attention._expand(latent)
        target = jax.nn.softmax(
            jnp.where(jnp.tri(T) > 0, jnp.einsum("btnh,bsnh->bnts", q, k) * layer.attention.scale, -1e9)
        ).sum(1)
        scores = jnp.einsum("btij,bsj->btis", index.queries, index.keys)
        scores = jnp.einsum("btis,bti->bts", jax.nn.relu(scores), index.weights)
        return target, jnp.where(jnp.tri(T) > 0, scores, -jnp.inf)

    target, scores = (np.argsort(-np.asarray(x), axis=-1)[:, topk:, :topk] for x in run(model))
    both = [len(set(a) & set(b)) for a, b in zip(target.reshape(-1, topk), scores.reshape(-1, topk), strict=True)]
    return float(np.mean(both)) / topk


@pytest.mark.longer
def test_the_dense_stage_trains_the_indexer_to_find_the_most_attended_keys():
    """All keys are seen, and groups freeze all else."""
    freeze = "optimizer.groups=[{path: indexer/}, {path: ., frozen: true}]"
    trainer = trainer_of(freeze, "model.scan_layers=false", "train.steps=30", "train.gradient_accumulation=2", topk=T)
    before = by_path(jax.tree.map(np.asarray, trainer.state.params))
    first = recall(trainer, 5)
    metrics = metrics_of_steps(trainer, 30)
    losses = [m["indexer_loss"] for m in metrics]
    assert losses[-1] < 0.7 * losses[0], losses
    found = recall(trainer, 5)
    assert found > first + 0.1, (first, found)
    for path, after in by_path(trainer.state.params).items():
        assert np.array_equal(before[path], after) != bool(re.search("indexer/", path)), path
