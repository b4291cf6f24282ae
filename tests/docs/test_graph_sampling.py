"""The example `graph_sampling`: sampled neighbours are neighbours, batches are reproducible, runs resume exactly."""

import jax
import numpy as np
import pytest

from benchmarks.training.fields import check_result, load_example

example = load_example("graph_sampling")
GRAPH = example.block_model(500, seed=0)


def edges(graph) -> set[tuple[int, int]]:
    sources = np.repeat(np.arange(len(graph.labels)), np.diff(graph.starts))
    return set(zip(sources.tolist(), graph.neighbours.tolist(), strict=True))


def test_the_graph_is_undirected_and_most_edges_stay_in_a_community():
    found = edges(GRAPH)
    assert found == {(target, source) for source, target in found}
    assert 11 < len(GRAPH.neighbours) / 500 < 13
    same = np.mean([GRAPH.labels[source] == GRAPH.labels[target] for source, target in found])
    assert 0.77 < same < 0.87  # 0.8 + 0.2 / 10 of them


def test_sampled_neighbours_are_neighbours():
    nodes = np.arange(500).reshape(50, 10)
    drawn = example.sample_neighbours(GRAPH, nodes, 7, np.random.default_rng(0))
    assert drawn.shape == (50, 10, 7)
    pairs = set(zip(np.repeat(nodes.ravel(), 7).tolist(), drawn.ravel().tolist(), strict=True))
    alone = {(node, node) for node in range(500) if GRAPH.starts[node] == GRAPH.starts[node + 1]}
    assert pairs <= edges(GRAPH) | alone


def test_a_node_without_neighbours_is_its_own():
    graph = example.Graph(np.array([0, 0, 1, 2]), np.array([2, 1]), np.zeros((3, 4)), np.zeros(3))
    drawn = example.sample_neighbours(graph, np.array([0, 1, 2]), 2, np.random.default_rng(0))
    assert drawn.tolist() == [[0, 0], [2, 2], [1, 1]]


def test_neighbours_are_drawn_evenly():
    graph = example.Graph(np.array([0, 4, 4, 4, 4]), np.arange(4), np.zeros((4, 4)), np.zeros(4))
    drawn = example.sample_neighbours(graph, np.zeros(1, int), 20_000, np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(drawn.ravel()) / 20_000, 0.25, atol=0.02)


def test_batches_depend_on_seed_and_step_alone():
    sampler = example.NeighbourSampler(GRAPH, np.arange(100), seed=1)
    again = example.NeighbourSampler(GRAPH, np.arange(100), seed=1)
    for name, value in sampler(3).items():
        np.testing.assert_array_equal(value, again(3)[name])
        assert (value != sampler(4)[name]).any()
    assert {name: value.shape[1:] for name, value in sampler(0).items()} == {
        "own": (64,), "near": (10, 64), "far": (10, 5, 64), "label": (),
    }  # fmt: skip


@pytest.mark.trains
def test_an_interrupted_run_ends_with_the_same_bits():
    assert example.resumes_exactly(example.NeighbourSampler(GRAPH, np.arange(100)), steps=4)


@pytest.mark.trains
def test_the_model_reads_neighbours_up_to_distance_two():
    batch = jax.tree.map(jax.numpy.asarray, example.NeighbourSampler(GRAPH, np.arange(100))(0))
    model = example.make_trainer(example.GraphSAGE, example.NeighbourSampler(GRAPH, np.arange(100)), 1).trained_module
    read = jax.grad(lambda far: model({**batch, "far": far}).sum())(batch["far"])
    assert (np.abs(read).sum((-1, -2, -3)) > 0).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 3])
def test_acceptance(seed):
    found = example.main(seed=seed)
    check_result(found)
    assert all(found["checks"].values()), found["checks"]
