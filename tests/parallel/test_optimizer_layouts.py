"""Every optimizer trains in every kind of layout as on one device, from stored state that it resumes exactly."""

import jax
import numpy as np
import pytest

from jaxstack.optim.optimizers import OPTIMIZERS
from tests.parallel.test_layouts import layout, reference, train
from tests.small_runs import make_trainer, run_steps, small_config

SETTINGS = {
    "soap": ("optimizer.block_size=8", "optimizer.refresh_every=3"),
    "shampoo": ("optimizer.block_size=8", "optimizer.refresh_every=3"),
    "sophia": ("optimizer.curvature_every=3",),
    "adamw_8bit": ("optimizer.min_size=256",),
    "schedule_free_adamw": ("schedule.name=constant",),
}
NAMES = [
    name for kind in OPTIMIZERS if "eps" in kind.model_fields and (name := kind.model_fields["name"].default) != "adamw"
]
LAYOUTS = [
    (*layout(1, 8, 1), "train.gradient_accumulation=2"),
    layout(2, 2, 2, True),
    (*layout(4, 1, 2), "parallel.zero=1"),
    (*layout(2, 2, 1), "parallel.pipeline=2"),
]


def shape_of(name: str) -> tuple[str, ...]:
    return (f"optimizer.name={name}", *SETTINGS.get(name, ()))


def cases():
    """Every optimizer in every layout; ZeRO and pipelines only where all tests run."""
    for name in NAMES:
        for index, overrides in enumerate(LAYOUTS):
            marks = () if index < 1 else pytest.mark.exhaustive
            yield pytest.param(name, overrides, marks=marks, id=f"{name} {' '.join(overrides)}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, overrides", cases())
def test_the_losses_are_those_of_one_device(name, overrides):
    found = train(*overrides, shape=shape_of(name))
    wanted = reference(*shape_of(name))
    assert wanted.losses[-1] < wanted.losses[0] - 0.02
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-5)
    # A value that lies between two codes of 8 bits is rounded to either of them, a few percent of a step apart.
    atol = 1e-3 if name == "adamw_8bit" else 5e-5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=1e-3), found.params, wanted.params)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES])
def test_a_run_goes_on_exactly_from_its_stored_state(name):
    config = small_config(*shape_of(name), "parallel.fsdp=2", "parallel.tensor=2")
    trainer = make_trainer(config)
    again = make_trainer(config)
    run_steps(trainer, 4)
    stored = jax.device_get(trainer.stored_state)
    stored = stored._replace(key=jax.random.clone(stored.key))
    again.stored_state = jax.device_put(stored, jax.tree.map(lambda x: x.sharding, again.abstract_stored_state))
    assert run_steps(again, 4, start=4) == run_steps(trainer, 4, start=4)
