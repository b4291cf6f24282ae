"""The methods that keep workers together, each against its closed form."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxstack.errors import ConfigError
from jaxstack.local_sgd.base import OuterState
from jaxstack.local_sgd.diloco import DiLoCo
from jaxstack.local_sgd.gossip import Gossip, mixing_weights
from jaxstack.local_sgd.local_sgd import LocalSGD
from jaxstack.local_sgd.reduction import Int8Mean, PowerSGD, low_rank_mean, quantize
from jaxstack.local_sgd.streaming import StreamingDiLoCo
from jaxstack.observe.collectives import collectives
from jaxstack.parallel.config import WORKERS
from jaxstack.run_config import load_config


def mixing_matrix(weights: Sequence[tuple[int, float]], workers: int) -> np.ndarray:
    """Return the matrix W of one gossip exchange: worker i's parameters become the sum over j of W[i, j] x_j."""
    matrix = np.zeros((workers, workers))
    for shift, weight in weights:
        matrix += weight * np.roll(np.eye(workers), shift, axis=1)
    return matrix


RANDOM = np.random.default_rng(0)


def on_workers(count, function):
    """`function` of arrays [workers, ...], applied by each worker to its own part."""
    mesh = jax.make_mesh((count,), (WORKERS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])

    def own(*trees):
        found = function(*jax.tree.map(lambda x: x[0], trees))
        return jax.tree.map(lambda x: x[None], found)

    spec = PartitionSpec(WORKERS)
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def draw(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def on_all(tree, count):
    """A state that is equal on all workers, as `on_workers` takes it."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)


@pytest.mark.parametrize(("workers", "gap"), [(8, 0.805), (16, 0.949), (64, 0.997)])
def test_ring_contracts_by_its_second_eigenvalue(workers, gap):
    matrix = mixing_matrix(mixing_weights("ring", workers)[0], workers)
    np.testing.assert_allclose(matrix.sum(0), 1)
    np.testing.assert_allclose(matrix.sum(1), 1)
    second = np.sort(np.abs(np.linalg.eigvals(matrix)))[-2]
    np.testing.assert_allclose(second, 1 / 3 + 2 / 3 * np.cos(2 * np.pi / workers))
    assert second == pytest.approx(gap, abs=1e-3)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_exponential_graph_gives_the_exact_mean_after_log_n_exchanges(workers):
    product = np.eye(workers)
    rounds = mixing_weights("exponential", workers)
    for weights in rounds:
        product = mixing_matrix(weights, workers) @ product
    assert len(rounds) == np.log2(workers)
    np.testing.assert_array_equal(product, np.full((workers, workers), 1 / workers))


def test_exchanges_are_due_in_turn():
    assert [LocalSGD(every=3).build(2, {}).due(step) for step in range(1, 7)] == [None, None, 0, None, None, 0]
    gossip = Gossip(every=2).build(8, {})
    assert [gossip.due(step) for step in range(2, 10, 2)] == [0, 1, 2, 0]
    streaming = StreamingDiLoCo(every=6, fragments=3).build(2, {})
    assert [streaming.due(step) for step in range(1, 8)] == [None, 1, None, 2, None, 0, None]


def test_fragments_cover_every_parameter_once():
    params = {"layers": {"w": np.ones((5, 2, 3))}, "embed": np.ones((7, 3)), "norm": np.ones(3)}
    stacked = {"layers": {"w": True}, "embed": False, "norm": False}
    exchange = StreamingDiLoCo(every=8, fragments=3).build(2, stacked)
    parts = [exchange._parts(fragment, params) for fragment in range(3)]
    assert sum(x.size for part in parts for x in part.values()) == 5 * 6 + 21 + 3
    layers = [part["layers/w"].shape[0] for part in parts]
    assert layers == [2, 2, 1]
    assert "embed" in parts[2]  # the fragment with the fewest layers
    unrolled = {"layers": {str(i): {"w": np.ones((2, 2))} for i in range(5)}}
    stacked = {"layers": {str(i): {"w": False} for i in range(5)}}
    exchange = StreamingDiLoCo(every=8, fragments=2).build(2, stacked)
    assert set(exchange._parts(1, unrolled)) == {"layers/1/w", "layers/3/w"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["local_sgd.every=5"], "needs parallel.workers of 2 or more"),
        (["parallel.workers=3", "local_sgd.name=gossip", "train.global_batch_size=6"], "power of two.*2 or 4"),
        (
            ["parallel.workers=2", "local_sgd={name: streaming, every: 2}"],
            r"must be at least fragments \(4\)",
        ),
        (["parallel.workers=2", "parallel.pipeline=2"], "does not support parallel.pipeline"),
        (["parallel.workers=2", "optimizer.name=schedule_free_adamw"], "schedule_free_adamw"),
        (["parallel.workers=2", "local_sgd={name: local_sgd, momentum: 0.5}"], "momentum"),
        (["parallel.workers=3", "train.global_batch_size=8"], r"workers x data x fsdp .*\(3 x 1 x 1"),
    ],
)
def test_what_cannot_be_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["model.num_layers=2", *overrides])


def test_one_worker_is_a_run_of_its_own():
    config = load_config(None, ["parallel={workers: 4, data: 2}", "train.global_batch_size=32"])
    alone = config.one_worker
    assert (alone.parallel.workers, alone.parallel.data, alone.train.global_batch_size) == (1, 2, 8)
    assert config.parallel.resolve(8) == config.parallel
    with pytest.raises(ConfigError, match=r"workers \(4\) must divide the number of devices \(6\)"):
        config.parallel.resolve(6)


def test_values_are_rounded_by_at_most_half_a_step():
    x = draw(3, 4, 64) * 10.0 ** jnp.arange(-3, 1)[:, None]
    values, scale = quantize(x)
    assert values.dtype == jnp.int8
    assert scale.shape == (3, 4, 1)
    assert jnp.all(jnp.abs(values * scale - x) <= scale * 0.5001)
    assert not jnp.any(quantize(jnp.zeros((2, 3)))[0])


@pytest.mark.parametrize("graph", ["ring", "exponential"])
def test_gossip_mixes_as_its_matrix_says(graph):
    exchange = Gossip(every=1, graph=graph).build(8, {})
    first = x = draw(8, 5)
    expected = np.eye(8)
    nothing = OuterState({}, {})
    for turn in range(3):
        phase = exchange.due(turn + 1)
        x = on_workers(8, lambda x, phase=phase: exchange(phase, x, nothing)[0])(x)
        expected = mixing_matrix(mixing_weights(graph, 8)[phase], 8) @ expected
    np.testing.assert_allclose(x, expected @ np.asarray(first), atol=1e-6)

    def apart(x):
        return np.linalg.norm(x - np.mean(x, 0))

    limit = 1e-6 if graph == "exponential" else (1 / 3 + 2 / 3 * np.cos(np.pi / 4)) ** 3
    assert apart(x) <= limit * apart(first)


def test_diloco_steps_as_nesterov_sgd_on_the_mean_progress():
    exchange = DiLoCo(every=1, outer_learning_rate=0.7, momentum=0.9).build(4, {"w": False})
    step = on_workers(4, lambda params, state: exchange(0, params, state))
    theirs = optax.sgd(0.7, momentum=0.9, nesterov=True)
    anchor = {"w": draw(3, 2)}
    params = on_all(anchor, 4)
    state = on_all(exchange.init(anchor), 4)
    outer = theirs.init(anchor)
    for _ in range(3):
        moved = {"w": params["w"] + draw(4, 3, 2)}
        gradient = {"w": anchor["w"] - moved["w"].mean(0)}
        updates, outer = theirs.update(gradient, outer, anchor)
        anchor = optax.apply_updates(anchor, updates)
        params, state = step(moved, state)
        np.testing.assert_allclose(params["w"], np.broadcast_to(anchor["w"], (4, 3, 2)), atol=1e-6)


def test_int8_mean_is_close_and_equal_everywhere_and_sends_bytes():
    x = {"w": draw(4, 8, 64), "v": draw(4, 5)}
    reduce = on_workers(4, lambda x: Int8Mean(4)(x, OuterState({}, {}))[0])
    found = jax.device_get(reduce(x))
    np.testing.assert_allclose(found["v"], np.broadcast_to(np.mean(x["v"], 0), (4, 5)), atol=1e-6)
    assert (found["w"] == found["w"][0]).all()
    largest = np.abs(x["w"]).max()
    assert np.abs(found["w"][0] - np.mean(x["w"], 0)).max() <= 2 * largest / 254
    rows = collectives(reduce.lower(x).compile().as_text(), {WORKERS: 4})
    small = {row.dtype: 0 for row in rows}
    for row in rows:
        small[row.dtype] += row.wire_bytes
    assert small["s8"] == 2 * 3 * 8 * 64 // 4  # each way, the three pieces of 8 x 64 values that others own
    assert sum(small.values()) < 0.5 * 2 * 3 / 4 * 8 * 64 * 4


def test_powersgd_is_exact_at_full_rank_and_feeds_its_error_back():
    own = draw(4, 2, 6, 5)
    full = on_workers(4, lambda own, factor: low_rank_mean(own, factor))
    mean, _, error = full(own, on_all(draw(2, 5, 5), 4))
    np.testing.assert_allclose(mean[0], own.mean(0), atol=1e-5)
    np.testing.assert_allclose(error.mean(0), 0, atol=1e-5)

    method = PowerSGD(rank=1)
    gradient = {"kernel": draw(4, 6, 5), "bias": draw(4, 5)}
    first = jax.tree.map(lambda x: x[0], gradient)
    step = on_workers(4, lambda tree, state: method(tree, state))
    state = on_all(method.init(first), 4)
    total = jnp.zeros((6, 5))
    for rounds in range(1, 31):
        found, state = step(gradient, state)
        total += found["kernel"][0]
        # What was not sent yet is in the errors: nothing is lost.
        sent = total + state.own["error"]["kernel"].mean(0)
        np.testing.assert_allclose(sent, rounds * gradient["kernel"].mean(0), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found["bias"][0], gradient["bias"].mean(0), atol=1e-6)
    left = np.linalg.norm(total / rounds - gradient["kernel"].mean(0)) / np.linalg.norm(gradient["kernel"].mean(0))
    assert left < 0.2
