"""A checkpoint of one run as the first of another."""

import errno
import os

import pytest

from jaxstack.checkpoint.directory import link_checkpoint
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.checkpoint.manifest import MANIFEST
from jaxstack.errors import ConfigError, JaxstackError
from tests.checkpoint.states import assert_same, make_state

pytestmark = pytest.mark.quick  # links files; trains nothing


@pytest.fixture
def source(tmp_path):
    with CheckpointManager(tmp_path / "a") as manager:
        for step in (2, 4):
            manager.save(step, make_state(step), {"batches": step}, wait=True)
    return tmp_path / "a"


def restored(folder, step):
    with CheckpointManager(folder) as manager:
        return manager.restore(step, make_state(0))[0]


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "copies"])
def test_the_branch_holds_the_state_when_the_source_is_gone(source, tmp_path, monkeypatch, links):
    def no_links(*_):
        raise OSError(errno.EXDEV, "another file system")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    assert link_checkpoint(source, 2, tmp_path / "b") == 2
    first = next(path for path in (source / "2").rglob("*") if path.is_file())
    assert os.path.samefile(first, tmp_path / "b" / first.relative_to(source)) == links
    with CheckpointManager(source) as manager:
        manager.save(2, make_state(9), wait=True)  # replaces the source's
    assert_same(restored(tmp_path / "b", 2), make_state(2))


def test_the_newest_is_the_default(source, tmp_path):
    assert link_checkpoint(source, None, tmp_path / "b") == 4
    assert os.listdir(tmp_path / "b") == ["4"]


def test_refusals(source, tmp_path):
    with pytest.raises(ConfigError, match=r"run.branch_step \(3\) is not a checkpoint in .*; kept there: 2, 4"):
        link_checkpoint(source, 3, tmp_path / "b")
    for step in (4, None):
        with pytest.raises(ConfigError, match=r"step 4, and this run ends at train.steps \(4\)"):
            link_checkpoint(source, step, tmp_path / "b", 4)
    assert not (tmp_path / "b").exists() and link_checkpoint(source, 2, tmp_path / "c", 4) == 2
    with pytest.raises(ConfigError, match="no checkpoint"):
        link_checkpoint(tmp_path / "none", None, tmp_path / "b")
    (source / "4" / MANIFEST).write_text("nonsense")
    with pytest.raises(JaxstackError, match="checkpoint 4 .* is damaged"):
        link_checkpoint(source, 4, tmp_path / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        link_checkpoint(source, 2, tmp_path / "file" / "b")
