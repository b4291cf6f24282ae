"""The example `quantum_sequences`: circuits are unitary, states are density matrices, and the model learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.training.fields import check_result, load_example

example = load_example("quantum_sequences")


def is_density(states: np.ndarray) -> None:
    np.testing.assert_allclose(states, np.conj(np.swapaxes(states, -1, -2)), atol=1e-5)
    np.testing.assert_allclose(np.trace(states, axis1=-2, axis2=-1), 1, atol=1e-4)
    assert np.linalg.eigvalsh(states).min() > -1e-5


@pytest.mark.longer
def test_a_circuit_is_unitary():
    unitary = np.asarray(example.circuit(jax.random.normal(jax.random.key(0), (3, 3, 3))))
    np.testing.assert_allclose(unitary @ unitary.conj().T, np.eye(8), atol=1e-5)


def test_a_controlled_z_between_neighbours_flips_the_sign_of_11():
    assert example.controlled_z(2).tolist() == [1, 1, 1, -1]
    assert example.controlled_z(3).tolist() == [1, 1, 1, -1, 1, 1, -1, 1]


@pytest.mark.longer
def test_joining_is_the_partial_trace_of_the_evolved_pair():
    box = example.circuit(jax.random.normal(jax.random.key(0), (2, 4, 3)))
    left, right = (example.pure_state(jax.random.normal(jax.random.key(k), (2, 2, 3))) for k in (1, 2))
    together = np.asarray(box @ jnp.kron(left, right) @ box.conj().T).reshape(4, 4, 4, 4)
    joined = np.asarray(example.join(box, left, right))
    np.testing.assert_allclose(joined, np.trace(together, axis1=1, axis2=3), atol=1e-5)
    is_density(joined)


def test_both_classes_have_the_same_residues_in_another_order():
    rows = example.proteins(4000, seed=0, mutations=0.0)
    hydrophobic = rows["residues"] < 8
    assert (hydrophobic.sum(1) == 18).all()
    changes = np.abs(np.diff(hydrophobic.astype(int), axis=1)).sum(1)
    assert (changes[rows["label"] == 1] <= 2).all() and changes[rows["label"] == 0].mean() > 15
    assert example.proteins(1000, seed=0)["residues"].max() == 19


@pytest.mark.exhaustive
@pytest.mark.trains
@pytest.mark.parametrize("model", ["Chain", pytest.param("Tree", marks=pytest.mark.exhaustive)])
def test_states_stay_density_matrices_in_training(model):
    trainer = example.make_trainer(getattr(example, model), steps=3, seed=1)
    trainer.fit(settings=example.QUIET)
    residues = jnp.asarray(example.proteins(8, seed=2)["residues"])
    states = trainer.trained_module.states(residues)
    assert states.shape == ((48 if model == "Chain" else 1), 8, 4, 4)
    is_density(np.asarray(states))
    assert np.isfinite(trainer.trained_module(residues)).all()


def test_parameters_are_those_of_the_claim():
    def count(model: type[nnx.Module]) -> int:
        return sum(x.size for x in jax.tree.leaves(nnx.eval_shape(lambda: nnx.state(model(nnx.Rngs(0)), nnx.Param))))

    assert [count(model) for model in (example.Chain, example.Tree, example.GRU)] == [336, 684, 340]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 3])
def test_acceptance(seed):
    found = example.main(seed=seed)
    check_result(found)
    assert all(found["checks"].values()), found["checks"]
    assert found["ours"] > found["baseline"] + 0.3
