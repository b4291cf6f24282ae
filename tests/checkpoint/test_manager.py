"""Keeping, replacing, locking, and what happens when a save fails."""

import os
import shutil
import subprocess
import sys
import threading

import jax.numpy as jnp
import pytest

from jaxstack.checkpoint import manifest
from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.leaves import abstract_state
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.errors import ConfigError, JaxstackError
from tests.checkpoint.states import assert_same, make_state


def test_keeps_the_newest_and_the_milestones(open_manager):
    manager = open_manager(keep=2, keep_every_steps=3)
    for step in range(1, 8):
        manager.save(step, {"x": jnp.full(4, step)})
    manager.wait()
    assert manager.all_steps() == [3, 6, 7]
    assert sorted(path.name for path in manager.directory.iterdir()) == [".lock", "3", "6", "7"]


def test_old_ones_stay_until_a_newer_one_is_committed(open_manager, monkeypatch):
    manager = open_manager(keep=1)
    manager.save(1, {"x": jnp.ones(4)}, wait=True)
    allow = threading.Event()
    hash_files = manifest.hash_files

    def slow(*arguments, **options):
        allow.wait(30)
        return hash_files(*arguments, **options)

    monkeypatch.setattr("jaxstack.checkpoint.manifest.hash_files", slow)
    manager.save(2, {"x": jnp.ones(4)})
    assert manager.all_steps() == [1]
    assert any(path.name.startswith(".saving-2") for path in manager.directory.iterdir())
    allow.set()
    manager.wait()
    assert manager.all_steps() == [2]


def test_a_step_is_replaced_by_a_new_save_of_it(open_manager):
    manager = open_manager()
    for seed in (1, 2):
        manager.save(5, make_state(seed), {"seed": seed})
    state, extra = manager.restore(5, abstract_state(make_state(2)))
    assert extra == {"seed": 2}
    assert_same(state, make_state(2))
    assert sorted(path.name for path in manager.directory.iterdir()) == [".lock", "5"]


def test_a_replacement_cut_off_between_its_renames_loses_nothing(open_manager):
    manager = open_manager()
    manager.save(5, make_state(1), wait=True)
    (manager.directory / "5").rename(manager.directory / ".replaced-5")
    assert manager.latest_step() == 5
    assert_same(manager.restore(5, abstract_state(make_state(1)))[0], make_state(1))
    manager.save(5, make_state(2), wait=True)
    assert sorted(path.name for path in manager.directory.iterdir()) == [".lock", "5"]


def test_discard_newer(open_manager):
    manager = open_manager(keep=9)
    for step in (1, 2, 3):
        manager.save(step, {"x": step})
    manager.discard_newer(1)
    assert manager.latest_step() == 1


def test_synchronous_saves_are_committed_when_save_returns(open_manager):
    manager = open_manager(asynchronous=False)
    manager.save(1, {"x": jnp.ones(4)})
    assert manager.last_save.step == 1


def test_only_one_process_saves_into_a_directory(open_manager, tmp_path, run_python):
    manager = open_manager()
    manager.save(1, {"x": jnp.ones(4)}, wait=True)
    result = run_python(
        "import sys\n"
        "from jaxstack.checkpoint.manager import CheckpointManager\n"
        "manager = CheckpointManager(sys.argv[1])\n"
        "print(manager.latest_step(), flush=True)\n"
        "manager.save(2, {'x': 1})\n",
        manager.directory,
    )
    assert result.stdout == "1\n"
    assert "another process saves checkpoints" in result.stderr and result.returncode == 1
    manager.close()
    manager.save(2, {"x": jnp.ones(4)}, wait=True)


def test_a_run_claims_its_directory_before_it_saves(open_manager, run_python):
    manager = open_manager()
    manager.claim()
    claim = (
        "import sys; from jaxstack.checkpoint.manager import CheckpointManager; CheckpointManager(sys.argv[1]).claim()"
    )
    result = run_python(claim, manager.directory)
    assert "another process saves checkpoints" in result.stderr and result.returncode == 1
    manager.save(1, {"x": jnp.ones(4)}, wait=True)


def test_a_directory_that_cannot_be_written_is_said_at_the_claim(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write .*file/checkpoints: Not a directory"):
        CheckpointManager(tmp_path / "file" / "checkpoints").claim()


def test_where_a_restart_cannot_write_another_one_may(tmp_path, monkeypatch):
    """The launcher then tries again, and keeps the copies of the state in memory until it gives up."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSTACK_ATTEMPT", "2")
    with pytest.raises(JaxstackError, match="cannot write .*file/checkpoints: Not a directory") as failure:
        CheckpointManager(tmp_path / "file" / "checkpoints").claim()
    assert failure.value.exit_code == 1


def test_a_directory_that_vanishes_is_made_anew(open_manager, warnings):
    manager = open_manager()
    manager.save(1, make_state(1), wait=True)
    shutil.rmtree(manager.directory)
    manager.save(2, make_state(2), wait=True)
    assert manager.all_steps() == [2] and len(warnings) == 1
    assert "was removed or renamed while the run saves there" in warnings[0]


def test_a_directory_that_another_run_has_taken_over_is_left_to_it(open_manager, run_python):
    """Removed under this run, and made again by the other: the old lock says nothing any more."""
    manager = open_manager()
    manager.save(1, make_state(1), wait=True)
    shutil.rmtree(manager.directory)
    code = """
import sys
from jaxstack.checkpoint.manager import CheckpointManager
manager = CheckpointManager(sys.argv[1])
manager.claim()
print("claimed", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, manager.directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "claimed\n"
        with pytest.raises(JaxstackError, match="another process saves"):
            manager.save(2, make_state(2))
    assert manager.all_steps() == []


def test_a_file_that_takes_the_directorys_place_fails_the_save_and_not_the_run(open_manager, warnings):
    manager = open_manager()
    manager.save(1, make_state(1), wait=True)
    shutil.rmtree(manager.directory)
    manager.directory.write_text("a file")
    manager.save(2, make_state(2))
    assert "step 2 was not saved" in warnings[-1]
    manager.directory.unlink()
    manager.save(3, make_state(3), wait=True)
    assert manager.all_steps() == [3]


def test_a_link_in_place_of_the_lock_is_not_written_through(open_manager, tmp_path):
    manager = open_manager()
    precious = tmp_path / "precious"
    precious.write_text("kept")
    manager.directory.mkdir()
    (manager.directory / ".lock").symlink_to(precious)
    with pytest.raises(ConfigError, match=r"cannot write .*\.lock"):
        manager.claim()
    assert precious.read_text() == "kept"


def test_a_failed_save_is_told_once_and_the_next_works(open_manager, warnings, monkeypatch):
    manager = open_manager()
    manager.save(1, {"x": jnp.ones(4)}, wait=True)

    def refuse(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("jaxstack.checkpoint.manifest.hash_files", refuse)
        manager.save(2, {"x": jnp.ones(4)})
        manager._join()
    assert len(warnings) == 1 and "step 2 was not saved: no space left" in warnings[0]
    assert sorted(path.name for path in manager.directory.iterdir()) == [".lock", "1"]
    manager.save(3, {"x": jnp.ones(4)})
    manager.close()
    assert manager.all_steps() == [1, 3] and len(warnings) == 1


def test_close_raises_when_the_last_save_failed(tmp_path, monkeypatch):
    told = []
    manager = CheckpointManager(tmp_path, CheckpointConfig(), report=told.append)

    def refuse(*arguments):
        raise OSError("broken disk")

    monkeypatch.setattr("jaxstack.checkpoint.manifest.write_manifest", refuse)
    manager.save(1, {"x": jnp.ones(4)})
    with pytest.raises(JaxstackError, match="step 1 was not saved: OSError: broken disk"):
        manager.close()
    manager.close()
    with pytest.raises(JaxstackError, match="step 2"):
        manager.save(2, {"x": jnp.ones(4)}, wait=True)
    assert len(told) == 1


def test_a_process_that_ends_without_close_says_what_it_lost(open_manager, tmp_path, run_python):
    result = run_python(
        "import sys, jax.numpy as jnp\n"
        "from jaxstack.checkpoint.manager import CheckpointManager\n"
        "manager = CheckpointManager(sys.argv[1])\n"
        "manager.save(1, {'x': 1}, wait=True)\n"
        "manager.save(2, {'x': [jnp.ones((2000, 2000))] * 9})\n"
        "raise SystemExit(3)\n",
        tmp_path / "checkpoints",
    )
    assert result.returncode == 3
    assert "the process ended without CheckpointManager.close()" in result.stderr
    assert open_manager().latest_step() == 1


@pytest.mark.parametrize("step", [-1, 1.0, "1", True])
def test_a_wrong_step_is_refused(open_manager, step):
    with pytest.raises(JaxstackError, match="step"):
        open_manager().save(step, {"x": 1})


def test_a_file_in_place_of_the_directory_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(JaxstackError, match="checkpoints is a file"):
        CheckpointManager(tmp_path / "checkpoints").latest_step()


def test_a_step_that_is_not_there_names_those_that_are(open_manager):
    manager = open_manager()
    manager.save(4, {"x": 1})
    with pytest.raises(JaxstackError, match="no checkpoint of step 5 .* there are 4"):
        manager.restore(5, {"x": 1})


@pytest.mark.exhaustive
def test_a_reader_tells_a_save_in_progress_from_one_that_was_cut_off(open_manager, warnings):
    """Another process, such as `generate`, reads the run while it saves."""
    manager = open_manager()
    manager.save(1, make_state(1), wait=True)
    (manager.directory / ".saving-2-1").mkdir()
    read = "import sys; from jaxstack.checkpoint.manager import CheckpointManager as M; "
    read += "print(M(sys.argv[1], report=print).latest_step())"
    said = subprocess.run([sys.executable, "-c", read, str(manager.directory)], capture_output=True, text=True).stdout
    assert f"is being written by process {os.getpid()} on " in said and said.endswith("\n1\n")
    manager.close()
    said = subprocess.run([sys.executable, "-c", read, str(manager.directory)], capture_output=True, text=True).stdout
    assert "is a save that was cut off" in said and said.endswith("\n1\n")
