"""muP: initial weights, learning rates, weight decay and epsilon by role, and that the base width is unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.loss import language_model_loss
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.initialization import Width, initial_factor, mup_width
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.optim.build import build_optimizer
from jaxstack.optim.optimizers import SGD, Adafactor, AdamW, Lion, Muon, Soap
from jaxstack.run_config import load_config
from tests.compilation import run_jitted
from tests.marks import longer

PATHS = {
    "embedding/table": "input",
    "position_embedding/table": "input",
    "decoder/layers/0/attention/q_proj/kernel": "hidden",
    "decoder/layers/0/attention/q_proj/bias": "input",
    "decoder/layers/0/mlp/experts/up_proj/kernel": "hidden",
    "decoder/layers/0/mlp/router/kernel": "output",
    "decoder/layers/0/norm/scale": "input",
    "head": "output",
}
FAMILIES = {
    "gpt2": {"norm": "layer_norm", "positions": "learned", "max_position_embeddings": 16, "mlp": "plain",
             "tie_word_embeddings": True, "qkv_bias": True, "mlp_bias": True},
    "llama": {"num_kv_heads": 2},
    "qwen": {"num_kv_heads": 2, "qk_norm": True, "qkv_bias": True, "initialization": "fan_in"},
    "gemma": {"norm": "rms_norm_unit_offset", "post_norms": True, "tie_word_embeddings": True, "head_dim": 12},
    "mixture": {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}},
}  # fmt: skip


def config(width: int, base: int | None, **changes) -> ModelConfig:
    heads = 4 * width // 32
    mup = {} if base is None else {"parametrization": "mup", "base_width": base}
    sizes = {
        "hidden_size": width,
        "num_heads": heads,
        "num_layers": 2,
        "vocab_size": 64,
        "intermediate_size": 2 * width,
    }
    scaled = {key: value * width // 32 if key == "num_kv_heads" else value for key, value in changes.items()}
    return ModelConfig.model_validate({**sizes, **mup, **scaled})


def parameters(config: ModelConfig) -> dict[str, np.ndarray]:
    module = ModuleArrays(lambda rngs: Transformer(config, rngs))
    params = jax.jit(module.init)(jax.random.key(0))[0]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(str(k.key) for k in path): np.asarray(x) for path, x in leaves}


def test_roles_by_path():
    assert {path: Width(2.0, False).role(path) for path in PATHS} == PATHS
    assert Width(2.0, True).role("final_norm/scale") == "final_gain"
    assert Width(2.0, False).role("final_norm/scale") == "input"


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_scale_with_the_width_and_not_at_the_base(family):
    changes = FAMILIES[family]
    plain = parameters(config(32, None, **changes))
    base = parameters(config(32, 32, **changes))
    assert all((plain[path] == base[path]).all() for path in plain), "the base width is the standard parametrization"
    standard = parameters(config(128, None, **changes))
    wide = parameters(config(128, 32, **changes))
    settings = config(128, 32, **changes)
    width = mup_width(settings)
    assert width is not None and width.ratio == 4
    powers = {"input": 0, "hidden": -0.5, "output": -1, "final_gain": -1}
    for path, x in wide.items():
        role = width.role(path)
        if np.std(plain[path]) > 0:
            # Against the narrow model: a hidden matrix shrinks by sqrt(4), the head by 4, embeddings not at all.
            assert np.std(x) / np.std(plain[path]) == pytest.approx(4.0 ** powers[role], rel=0.15), path
            np.testing.assert_allclose(x, standard[path] * initial_factor(settings, width, path), rtol=1e-6)
        elif role == "final_gain" and path.endswith("scale"):
            offset = 1 if settings.norm == "rms_norm_unit_offset" else 0
            np.testing.assert_allclose(x + offset, 0.25, rtol=1e-6)
        else:
            np.testing.assert_array_equal(x, standard[path])


WANTED = {
    AdamW: (1.0, 0.25, 0.25, 0.25),
    Lion: (1.0, 0.25, 0.25, 0.25),
    SGD: (4.0, 1.0, 0.25, 0.25),
    Muon: (1.0, 0.5, 0.25, 0.25),
    Soap: (1.0, Soap.matrix_width_power, 0.25, 0.25),
}


@pytest.mark.parametrize(
    "kind", [AdamW, *longer(*(kind for kind in WANTED if kind is not AdamW))], ids=lambda kind: kind.__name__
)
def test_learning_rates_and_decay_by_role(kind):
    paths = {"embedding": "table", "up_proj": "kernel", "router": "kernel", "final_norm": "scale"}
    params = {name: {leaf: jnp.ones((4, 4) if leaf != "scale" else (4,))} for name, leaf in paths.items()}
    random = np.random.default_rng(0)
    steps = [jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), jnp.float32), params) for _ in range(3)]

    def moves(width: Width | None, decay: float, gradients) -> list[jax.Array]:
        settings = kind(clip_norm=None, weight_decay=decay, **({"eps": 1e-20} if "eps" in kind.model_fields else {}))
        optimizer = build_optimizer(settings, lambda step: 0.1, params, width=width)
        state = optimizer.init(params)
        for g in gradients:
            updates, state = optimizer.update(g, state, params)
        return [updates[name][leaf] for name, leaf in paths.items()]

    wide = moves(Width(4.0, True), 0.0, steps)
    plain = moves(None, 0.0, steps)
    wanted = list(WANTED[kind])
    wanted[1] = 4.0**kind.matrix_width_power if kind is Soap else wanted[1]
    for found, base, factor in zip(wide, plain, wanted, strict=True):
        np.testing.assert_allclose(found, factor * base, rtol=1e-4, atol=1e-7)
    zeros = [jax.tree.map(jnp.zeros_like, params)]
    for found, base in zip(moves(Width(4.0, True), 0.5, zeros), moves(None, 0.5, zeros), strict=True):
        np.testing.assert_allclose(found, base, rtol=1e-5)


def test_epsilon_falls_with_the_width():
    """An update of AdamW with g = eps is half the learning rate."""
    params = {"embedding": {"table": jnp.ones((2, 2))}}
    optimizer = build_optimizer(AdamW(eps=1e-3, clip_norm=None, weight_decay=0.0), lambda _: 1.0, params,
                                width=Width(4.0, False))  # fmt: skip
    gradient = {"embedding": {"table": jnp.full((2, 2), 1e-3 / 4)}}
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["embedding"]["table"], -0.5, rtol=1e-5)


def test_clipping_of_sgd_does_not_depend_on_the_width():
    """Gradients as muP scales them: of an element 1/m in the embedding and 1 in the head, over m times as many."""

    def update(m: int, limit: float) -> list[jax.Array]:
        """Elements of the updates in units of the learning rates, m for embeddings and 1/m for the head."""
        gradients = {"embedding": {"table": jnp.full((2, 8 * m), 1 / m)}, "head": jnp.ones((8 * m, 2))}
        settings = SGD(clip_norm=limit, momentum=0.0)
        optimizer = build_optimizer(settings, lambda _: 1.0, gradients, width=Width(float(m), False))
        updates, _ = optimizer.update(gradients, optimizer.init(gradients), gradients)
        return [updates["embedding"]["table"][0, 0], m * updates["head"][0, 0]]

    for limit, wanted in ((1.0, -(32**-0.5)), (100.0, -1.0)):
        found = run_jitted(lambda limit=limit: (update(1, limit), update(4, limit)))
        np.testing.assert_allclose(found, [[wanted] * 2] * 2, rtol=1e-6)


def test_attention_scale():
    wide = config(128, 32, head_dim=32, base_head_dim=8)
    assert wide.attention_scale == pytest.approx(8**0.5 / 32)
    assert config(128, 32).attention_scale == pytest.approx(8**-0.5), "more heads of the same width"


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["model.parametrization=mup"], "parametrization: mup needs base_width"),
        (["model.base_width=64"], "base_width needs parametrization: mup"),
        (["model.parametrization=mup", "model.base_width=64", "model.scale_embeddings=true"], "scale_embeddings"),
        (["model.parametrization=mup", "model.base_width=64", "model.attention.name=linear"], "attention.name linear"),
        (["model.parametrization=mup", "model.base_width=64", "optimizer.name=adafactor"], "choose adamw, lion, sgd"),
        (["model.parametrization=mup", "model.base_width=64", "model.query_pre_attn_scalar=64",
          "model.base_head_dim=8"], "give one of them"),
        (["model.parametrization=mup", "model.base_width=64", "adapters.rules=[{path: q_proj}]"], "adapters"),
    ],
)  # fmt: skip
def test_what_cannot_hold_is_refused(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config(None, overrides)


def test_an_optimizer_without_a_rule_is_refused_by_the_library():
    with pytest.raises(ConfigError, match="optimizer.name adafactor depends on the width is not known"):
        build_optimizer(Adafactor(), lambda _: 1.0, {"head": jnp.ones((2, 2))}, width=Width(2.0, False))


def test_a_model_is_built_at_its_width():
    model = Transformer(config(64, 32), nnx.Rngs(0))
    assert model.width == Width(2.0, False)


def magnitudes_after_training(config: ModelConfig, kind, rate: float) -> dict[str, float]:
    """Mean magnitudes of the residual stream and the logits after five steps on one batch."""
    module = ModuleArrays(lambda rngs: Transformer(config, rngs))
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, config.vocab_size)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    optimizer = build_optimizer(kind(), lambda _: rate, module.abstract_params, width=mup_width(config))

    @jax.jit
    def train(key: jax.Array) -> dict[str, jax.Array]:
        params, rest = module.init(key)

        def loss(params):
            found = language_model_loss(module.merge(params, rest), batch)
            return found.total / found.count

        def step(_, carry):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state, params)
            return jax.tree.map(jnp.add, params, updates), state

        params, _ = jax.lax.fori_loop(0, 5, step, (params, optimizer.init(params)))
        model = module.merge(params, rest)
        logits = model(batch["tokens"])
        setattr(model, "final_norm", lambda x: x)  # noqa: B010 (the residual stream is the input of the final norm)
        found = {"residual": model.hidden(batch["tokens"]), "logits": logits}
        return {name: jnp.mean(jnp.abs(x)) for name, x in found.items()}

    return {name: float(value) for name, value in train(jax.random.key(0)).items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "kind", "rate"),
    [*((family, AdamW, 0.02) for family in FAMILIES),
     ("llama", Lion, 0.01), ("llama", SGD, 2.0), ("llama", Muon, 0.05), ("llama", Soap, 0.02)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_activations_do_not_grow_with_the_width(family, kind, rate):
    changes = {"initialization": "fan_in", **FAMILIES[family]}
    if "num_kv_heads" not in changes and "head_dim" not in changes:
        changes["head_dim"] = 8
    narrow, wide = (magnitudes_after_training(config(w, 32, **changes), kind, rate) for w in (32, 256))
    standard = magnitudes_after_training(config(256, None, **changes), kind, rate)
    for name in narrow:
        assert wide[name] < 1.3 * narrow[name], name
    grown = {name: standard[name] / narrow[name] for name in narrow}
    assert max(grown.values()) > 1.3, "the standard parametrization does"
