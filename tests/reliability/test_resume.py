"""Rows 6, 7 and 9: a run that is killed goes on as if nothing had been, on any mesh, and not on other data."""

import os
import shutil
import signal

import jax
import numpy as np
import pytest

from jaxstack.checkpoint.leaves import name_leaves
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.data.loader import open_data
from jaxstack.errors import ConfigError
from jaxstack.run.build import make_trainer, resolve_model
from jaxstack.run.setting import with_training_layout
from jaxstack.run_config import load_config
from tests.checkpoint.states import raw
from tests.reliability.runs import Runs, finish, waiting
from tests.reliability.states import read_checkpoint

pytestmark = pytest.mark.exhaustive
MESHES = {
    "fsdp 4": ("parallel.data=1", "parallel.fsdp=4"),
    "data 2 x tensor 2": ("parallel.data=2", "parallel.tensor=2"),
    "one device": ("parallel.data=1", "parallel.simulate_devices=1"),
    "data 2 x fsdp 2": ("parallel.data=2", "parallel.fsdp=2"),
    "fsdp 2 x tensor 2, sequence": (
        "parallel.data=1",
        "parallel.fsdp=2",
        "parallel.tensor=2",
        "parallel.sequence=true",
    ),
}
PLAIN = ("train.eval_every_steps=null", "train.steps=20")


def complete(runs: Runs, name: str, *overrides: str) -> str:
    """A run to its end; what it said."""
    code, said = finish(runs.start(runs.train(name, *overrides)))
    assert code == 0, said
    return said


@pytest.fixture(scope="module")
def unbroken(runs: Runs) -> str:
    """Twenty steps."""
    complete(runs, "whole", *PLAIN)
    return "whole"


def test_killed_and_resumed_is_bit_equal(runs: Runs, unbroken, record):
    """Row 6. SIGKILL once step 7 is logged: after checkpoint 5, and in the middle of whatever it does."""
    process = runs.start(runs.train("killed", *PLAIN))
    for _ in waiting(process):
        if runs.saved("killed") and any(line["step"] >= 7 for line in runs.lines("killed")):
            break
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert runs.saved("killed")[-1] < 20
    said = complete(runs, "killed", *PLAIN)
    assert "resuming from step" in said
    found = runs.losses("killed")
    wanted = runs.losses(unbroken)
    assert found == wanted and sorted(found) == list(range(1, 21))
    leaves = read_checkpoint(runs.folder / unbroken, 20)
    assert any("key" in name for name in leaves) and any("optimizer" in name for name in leaves)
    assert read_checkpoint(runs.folder / "killed", 20) == leaves
    record(
        6, "SIGKILL after step 7 of 20, resumed", f"20 losses and all {len(leaves)} leaves of the last state bit-equal"
    )


def test_resumed_on_other_meshes(runs: Runs, unbroken, record, full):
    """Row 7. Checkpoint 5 of data 4: first what is on the devices after restoring, then 15 steps."""
    wanted = runs.losses(unbroken)
    worst = 0.0
    stored = read_checkpoint(runs.folder / unbroken, 5)
    for number, (mesh, overrides) in enumerate(list(MESHES.items())[: None if full else 2]):
        name = f"mesh-{number}"
        shutil.copytree(runs.folder / unbroken / "checkpoints" / "5", runs.folder / name / "checkpoints" / "5")
        assert restored_bits(runs, name, overrides) == stored, mesh
        assert "resuming from step 5" in complete(runs, name, *PLAIN, *overrides)
        found = runs.losses(name)
        assert sorted(found) == list(range(6, 21))
        worst = max(worst, *(abs(found[step] / wanted[step] - 1) for step in found))
        assert worst < 1e-6, (mesh, found, wanted)
    record(
        7,
        f"resumed on {number + 1} other meshes",
        f"restored bit-equal; 15 losses each within {worst:.1e} (relative) of the run on data 4",
    )


def restored_bits(runs: Runs, name: str, overrides: tuple[str, ...]) -> dict[str, bytes]:
    """What a run on this mesh has on its devices after restoring, in this process."""
    config = load_config(runs.config, overrides)
    devices = jax.devices()[: config.parallel.simulate_devices]
    config = with_training_layout(config, len(devices))
    data = open_data(config.data, sequence_length=32, seed=0)
    config = config.model_copy(update={"model": resolve_model(config.model, data.tokenizer.vocab_size)})
    trainer = make_trainer(config, data, devices)
    manager = CheckpointManager(runs.folder / name / "checkpoints")
    state, _ = manager.restore(5, trainer.abstract_state)
    leaves = name_leaves(state)[0]
    for leaf, place in zip(leaves.values(), jax.tree.leaves(trainer.shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    return {key: raw(leaf) for key, leaf in leaves.items()}


def test_other_data_is_refused_unless_it_is_accepted(runs: Runs, unbroken, record, full):
    """Row 9. Each in a start of its own, from the same run directory."""
    other = runs.folder / "other"
    if not other.exists():
        other.mkdir()
        for path in (runs.texts).iterdir():
            (other / path.name).write_text(path.read_text())
        victim = sorted(other.iterdir())[0]
        victim.write_text(victim.read_text().replace("e", "E", 1))  # one letter of one file
    changes = {
        "seed": ("run.seed=1",),
        "data file": (f"data.sources=[{{path: {other}}}]",),
        "batch": ("train.global_batch_size=8",),
        "tokenizer": ("data.tokenizer.name=bpe", "data.tokenizer.vocab_size=300"),
    }
    said_of = {
        "seed": "seed was 0, is 1",
        "batch": "global_batch_size was 4, is 8",
        "tokenizer": "tokenizer",
        "data file": f"the source was {runs.texts}, is {other}",
    }
    for change in list(changes)[: None if full else 2]:
        code, said = finish(runs.start(runs.train(unbroken, *PLAIN, "train.steps=25", *changes[change])))
        (line,) = [line for line in said.splitlines() if "is not what" in line]
        assert code == 2 and said_of[change] in line and "accept_data_change" in line and "Traceback" not in said
        assert runs.saved(unbroken)[-1] == 20
    said = complete(runs, unbroken, *PLAIN, "train.steps=22", *changes["seed"], "resilience.accept_data_change=true")
    assert "warning: the data is not what" in said and "seed was 0, is 1" in said and "resuming from step 20" in said
    assert max(runs.losses(unbroken)) == 22
    names = list(changes)[: None if full else 2]
    record(9, f"changed {', '.join(names)}", "refused with the difference in one line; accepted where the user says so")


def test_a_wrong_type_of_acceptance_is_refused():
    with pytest.raises(ConfigError, match="accept_data_change"):
        load_config(None, ["resilience.accept_data_change=maybe"])


def test_bits_are_compared_not_values(tmp_path):
    """-0.0 and 0.0 are equal and not the same bits."""
    for name, zero in (("a", 0.0), ("b", -0.0)):
        with CheckpointManager(tmp_path / name / "checkpoints") as manager:
            manager.save(1, {"x": np.full(3, zero, np.float32)})
    assert read_checkpoint(tmp_path / "a", 1) != read_checkpoint(tmp_path / "b", 1)
