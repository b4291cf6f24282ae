"""Answers packed into few rows: where they are, that gradients stay, and that empty microbatches cost nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.gradients.build import make_gradients
from jaxstack.loss import IGNORE
from jaxstack.models import Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, ShardingContext, StepLayout, make_mesh, make_rules
from jaxstack.reinforce.policy import PolicyConfig, policy_loss
from jaxstack.reinforce.rollout import fill_order, pack_answers
from tests.small_runs import VOCABULARY, small_config

T = 16


def made_batch(lengths: list[int]) -> dict[str, np.ndarray]:
    """Random answers, one in each row, the first two tokens of which are the prompt."""
    random = np.random.default_rng(0)
    shape = (len(lengths), T)
    batch = {"tokens": np.zeros(shape, np.int32), "labels": np.full(shape, IGNORE, np.int32)}
    batch |= {name: np.zeros(shape, np.float32) for name in ("sampler_logprobs", "advantages", "shares")}
    for row, length in enumerate(lengths):
        batch["tokens"][row, :length] = random.integers(0, VOCABULARY, length)
        places = slice(1, length)
        batch["labels"][row, places] = random.integers(0, VOCABULARY, length - 1)
        batch["sampler_logprobs"][row, places] = -random.random(length - 1) - 3
        batch["advantages"][row, places] = random.normal()
        batch["shares"][row, places] = 1 / (length - 1)
    return batch


def test_answers_share_rows_by_best_fit():
    batch = made_batch([4, 16, 9, 5, 7, 3, 2, 8])
    lengths = np.array([4, 16, 9, 5, 7, 3, 2, 8])
    order = fill_order(8, 2, 2)
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7], "a microbatch has rows of each device"
    packed = pack_answers(batch, lengths, order, 2)
    assert packed["computed"].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert packed["segment_ids"][0].tolist() == [1] * 16
    assert packed["segment_ids"][1].tolist() == [1] * 9 + [2] * 7 and (packed["labels"][[2, 3, 6, 7]] == IGNORE).all()
    assert packed["positions"][1].tolist() == [*range(9), *range(7)]
    np.testing.assert_array_equal(packed["tokens"][1], [*batch["tokens"][2, :9], *batch["tokens"][4, :7]])
    assert (packed["labels"] != IGNORE).sum() == (batch["labels"] != IGNORE).sum()
    assert packed["segment_ids"][2].tolist() == [1] * 16, "padding is a segment of its own"
    empty = pack_answers(batch, np.array([], int), order, 2)
    assert not empty["computed"].any() and {x: y.shape for x, y in empty.items()} == {
        x: y.shape for x, y in packed.items()
    }


@pytest.mark.longer
@pytest.mark.parametrize(("loss", "devices"), [("gspo", 2), ("dr_grpo", 1)])
def test_gradients_stay_and_empty_microbatches_are_not_computed(loss, devices):
    batch = made_batch([4, 16, 9, 5, 7, 3, 2, 8])
    lengths = np.array([4, 16, 9, 5, 7, 3, 2, 8])
    packed = pack_answers(batch, lengths, fill_order(8, devices, 4), 4)
    settings = PolicyConfig(loss=loss, sampler_correction={"method": "truncate_answers"})
    module = ModuleArrays(lambda rngs: Transformer(small_config().model, rngs, dtype=jnp.float32))
    computed = []

    def count(model, batch, *, train=False):
        jax.debug.callback(lambda: computed.append(1))
        return policy_loss(model, batch, train=train, settings=settings, temperature=0.8, length=T)

    mesh = make_mesh(ParallelConfig(fsdp=devices), jax.devices()[:devices])
    context = ShardingContext(make_rules(mesh), StepLayout())
    params, non_params = module.init(jax.random.key(0))
    found = []
    for arrays in (batch, packed):
        gradients = jax.jit(make_gradients(module, count, context, 4))
        sums, _ = gradients(params, non_params, {k: jnp.asarray(x) for k, x in arrays.items()}, jax.random.key(1))
        jax.block_until_ready(sums)
        jax.effects_barrier()
        found.append((sums, len(computed)))
        computed.clear()
    (whole, all_of_them), (fewer, some) = found
    assert (all_of_them, some) == (4 * devices, 2 * devices)
    np.testing.assert_allclose(fewer.loss, whole.loss, rtol=1e-5)
    assert fewer.count == pytest.approx(float(whole.count))
    for name, value in whole.further.items():
        assert float(fewer.further[name].total) == pytest.approx(float(value.total), rel=1e-4, abs=1e-5), name
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), fewer.gradients, whole.gradients)
