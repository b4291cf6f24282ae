"""What a run resumes from: the newest state in memory or on disk; and the message if its data has changed."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxstack.checkpoint import memory_folder
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.checkpoint.memory import MemoryCheckpoints
from jaxstack.config.features import fixed_sections
from jaxstack.data.config import DataConfig, SourceConfig, TokenizerConfig
from jaxstack.data.loader import Data, open_data
from jaxstack.errors import ConfigError
from jaxstack.resilience.run_checkpoints import RunCheckpoints
from jaxstack.run_config import FEATURES

STATE = {"w": np.zeros(2, np.float32)}


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abcd":
        (folder / f"{name}.txt").write_text(f"{name} is a letter. " * 60)
    return folder


def opened(texts: Path) -> Data:
    config = DataConfig(
        sources=(SourceConfig(path=str(texts)),),
        tokenizer=TokenizerConfig(name="byte"),
        cache_dir=str(texts.parent / "cache"),
        held_out_fraction=0.0,
    )
    return open_data(config, sequence_length=32, seed=0)


def checkpoints(manager: CheckpointManager, data: Data, say: Any = print, **options: Any) -> RunCheckpoints:
    options = {"accept_data_change": False, "sources": data.source_listing, "settings": {}, **options}
    options["fixed"] = fixed_sections(FEATURES)
    return RunCheckpoints(manager, Path("runs/x"), data=data.fingerprint, say=say, **options)


def test_a_refusal_names_the_files_that_were_added_removed_and_changed(texts, tmp_path):
    with CheckpointManager(tmp_path / "run" / "checkpoints") as manager:
        checkpoints(manager, opened(texts)).save(1, STATE, None)
        manager.wait()
        (texts / "a.txt").write_text("shorter " * 60)
        (texts / "b.txt").unlink()
        (texts / "e.txt").write_text("a new file " * 60)
        again = (texts / "d.txt").read_text().replace("letter", "LETTER")
        (texts / "d.txt").write_text(again)
        os.utime(texts / "d.txt", (1, 1))
        now = opened(texts)
        with pytest.raises(ConfigError, match="added e.txt; removed b.txt; changed a.txt") as refused:
            checkpoints(manager, now).restore(STATE, {})
        said = str(refused.value)
        assert (
            "(was 900 bytes, is 480)" in said and "rewritten with the same size d.txt" in said and "shards" not in said
        )
        heard: list[str] = []
        restored = checkpoints(manager, now, heard.append, accept_data_change=True).restore(STATE, {})
        assert restored is not None and restored.step == 1 and "added e.txt" in heard[0]


def test_files_that_were_only_touched_are_no_change(texts, tmp_path):
    with CheckpointManager(tmp_path / "run" / "checkpoints") as manager:
        checkpoints(manager, opened(texts)).save(1, STATE, None)
        manager.wait()
        os.utime(texts / "a.txt", (1, 1))
        assert checkpoints(manager, opened(texts)).restore(STATE, {}) is not None


def test_checkpoints_without_a_list_and_long_lists(texts, tmp_path, monkeypatch):
    with CheckpointManager(tmp_path / "run" / "checkpoints") as manager:
        checkpoints(manager, opened(texts), sources=None).save(1, STATE, None)
        manager.wait()
        monkeypatch.setattr("jaxstack.data.fingerprint._MOST_FILES", 3)
        data = opened(texts)
        assert data.source_listing[0]["files"] is None
        checkpoints(manager, data).save(2, STATE, None)
        manager.wait()
        (texts / "e.txt").write_text("a new file " * 60)
        with pytest.raises(ConfigError, match=r"had 4 files \(3.5 KiB\), has 5 files \(4.2 KiB\)"):
            checkpoints(manager, opened(texts)).restore(STATE, {})
        manager.discard_newer(1)
        with pytest.raises(ConfigError, match=r"shards\[0\] was"):
            checkpoints(manager, opened(texts)).restore(STATE, {})


def adapters(**change: Any) -> dict[str, Any]:
    rule = {"path": "attention", "method": "lora", "rank": 2, "alpha": 4.0, "dropout": 0.0, **change}
    return {"adapters": {"rules": [rule]}}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"alpha": 64.0}, "adapters.rules[0].alpha was 4.0, is 64.0"),
        ({"rank": 4}, "adapters.rules[0].rank was 2, is 4"),
        ({"path": "mlp"}, "adapters.rules[0].path was 'attention', is 'mlp'"),
        ({"method": "dora"}, "adapters.rules[0].method was 'lora', is 'dora'"),
    ],
)
def test_a_run_goes_on_with_its_adapters(change, said, texts, tmp_path):
    with CheckpointManager(tmp_path / "run" / "checkpoints") as manager:
        data = opened(texts)
        checkpoints(manager, data, settings=adapters()).save(1, STATE, None)
        manager.wait()
        with pytest.raises(ConfigError, match="a run goes on with the adapters") as refused:
            checkpoints(manager, data, settings=adapters(**change)).restore(STATE, {})
        assert said in str(refused.value) and "run.init_from=runs/x" in str(refused.value)
        with pytest.raises(ConfigError, match="adapters.rules was "):
            checkpoints(manager, data, settings={"adapters": {"rules": []}}).restore(STATE, {})
        heard: list[str] = []
        grown = adapters(dropout=0.1, since_a_later_version=1)
        restored = checkpoints(manager, data, heard.append, settings=grown).restore(STATE, {})
        assert restored is not None and restored.step == 1
        assert heard == ["warning: not as checkpoint 1 was trained: adapters.rules[0].dropout was 0.0, is 0.1"]


def filled(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(2, step, np.float32)}


@pytest.fixture
def reopened(tmp_path, monkeypatch):
    """Returns a function that opens the checkpoints of a run as one start of its process after another."""
    folder = memory_folder.make_folder(tmp_path)
    monkeypatch.setenv(memory_folder.VARIABLE, str(folder))

    def reopen(said: list[str] | None = None) -> RunCheckpoints:
        report = [].append if said is None else said.append
        manager = CheckpointManager(tmp_path / "run" / "checkpoints", report=report)
        memory = MemoryCheckpoints(2, tmp_path / "run", STATE, report=report)
        return RunCheckpoints(
            manager, tmp_path / "run", data={}, settings={}, accept_data_change=False, say=report, memory=memory
        )

    return reopen


def kept(opened: RunCheckpoints, *, on_disk: tuple[int, ...] = (), in_memory: tuple[int, ...] = ()) -> None:
    for step in on_disk:
        opened.save(step, filled(step), None)
    for step in in_memory:
        opened.copy(step, filled(step), {"total": step}, {"answers": np.arange(step)})
    opened.wait()
    opened.manager.close()


@pytest.mark.parametrize(
    ("on_disk", "in_memory", "damaged", "expected", "source"),
    [
        ((2,), (4,), (), 4, "from memory: own 1, neighbour 0"),
        ((), (4,), (), 4, "from memory: own 1, neighbour 0"),
        ((4,), (2, 4), (), 4, "from memory: own 1, neighbour 0"),
        ((2, 6), (4,), (), 6, "run/checkpoints"),
        ((2, 6), (4,), (6,), 4, "from memory: own 1, neighbour 0"),
        ((4, 6), (2,), (6,), 4, "run/checkpoints"),
    ],
)
def test_the_newest_intact_state_is_restored(reopened, tmp_path, on_disk, in_memory, damaged, expected, source):
    kept(reopened(), on_disk=on_disk, in_memory=in_memory)
    for step in damaged:
        (tmp_path / "run" / "checkpoints" / str(step) / "checkpoint.json").write_text("{}")
    opened = reopened()
    restored = opened.restore(STATE, {})
    assert restored is not None and restored.step == expected and restored.source.endswith(source)
    assert (restored.state["w"] == expected).all()
    if "memory" in source:
        assert restored.skipped == {"total": expected} and len(restored.data["answers"]) == expected
        assert opened.saved_step == -1, "it is not on disk yet"
    again = reopened().restore(STATE, {})
    assert again is not None and again.step == expected, "copies that were not used are gone, the used one is not"


@pytest.mark.parametrize("place", ["copy", "save"])
def test_metrics_that_wait_for_room_are_kept_with_the_state(reopened, place):
    opened = reopened()
    getattr(opened, place)(2, filled(2), None, waiting={"jsonl": b"\xff\n", "tensorboard": b"\0"})
    opened.wait()
    opened.manager.close()
    restored = reopened().restore(STATE, {})
    assert restored is not None and restored.waiting == {"jsonl": b"\xff\n", "tensorboard": b"\0"}


def test_rolling_back_deletes_later_copies_in_memory(reopened):
    opened = reopened()
    kept(opened, on_disk=(2,), in_memory=(4,))
    assert opened.roll_back(3).startswith("rolled back to checkpoint 2")
    restored = reopened().restore(STATE, {})
    assert restored is not None and restored.step == 2
