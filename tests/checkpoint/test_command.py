import shutil
import subprocess

import pytest

from jaxstack.checkpoint.__main__ import main
from tests.checkpoint.states import make_state


@pytest.fixture
def directory(open_manager):
    manager = open_manager(keep=9)
    for step in (10, 20, 30, 40):
        manager.save(step, {"state": make_state(step)}, wait=True)
    manager.close()
    return manager.directory


def damage(step_directory):
    victim = max(step_directory.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    return victim


def test_list(directory, capsys):
    (directory / "stray").mkdir()
    (directory / "20" / "checkpoint.json").unlink()
    assert main(["list", str(directory.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["10", "20", "30", "40"]
    assert "damaged: checkpoint.json" in lines[2] and "right sizes" in lines[3]
    assert "stray" in lines[5] and "contents are not read here" in lines[6]


def test_a_place_without_checkpoints_is_said_to_have_none(tmp_path, capsys):
    assert main(["list", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"jaxstack checkpoint: no checkpoint in {tmp_path}\n"


@pytest.mark.parametrize("file, kind", [("compressed/x", "a compressed run"), ("config.json", "a Hugging Face")])
def test_models_without_steps_are_told_apart(file, kind, tmp_path, capsys):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    assert main(["list", str(tmp_path)]) == 2
    assert f"{tmp_path} is {kind}" in capsys.readouterr().err


def test_verify(directory, capsys):
    assert main(["verify", str(directory)]) == 0
    victim = damage(directory / "30")
    assert main(["verify", str(directory)]) == 1
    output = capsys.readouterr().out
    assert f"step 30: damaged: {victim.relative_to(directory / '30').as_posix()}" in output
    assert main(["verify", str(directory), "--step", "40"]) == 0
    assert main(["verify", str(directory), "--step", "41"]) == 1


def test_verify_agrees_with_sha256sum(directory, capsys):
    if shutil.which("sha256sum") is None:
        pytest.skip("no sha256sum here")
    command = ["sha256sum", "-c", "SHA256SUMS"]
    assert subprocess.run(command, cwd=directory / "10", capture_output=True).returncode == 0
    damage(directory / "10")
    assert subprocess.run(command, cwd=directory / "10", capture_output=True).returncode != 0


def test_prune_keeps_intact_ones(directory, capsys):
    damage(directory / "40")
    (directory / ".saving-50-1").mkdir()
    (directory / "mine").mkdir()
    assert main(["prune", str(directory), "--keep", "1", "--keep-every-steps", "20", "--dry-run"]) == 0
    assert (directory / "40").exists() and (directory / ".saving-50-1").exists()
    assert main(["prune", str(directory), "--keep", "1", "--keep-every-steps", "20"]) == 0
    names = {path.name for path in directory.iterdir()}
    assert names == {"20", "30", "mine", ".lock"}
    assert "kept: 20, 30" in capsys.readouterr().out


def test_prune_deletes_nothing_when_nothing_is_intact(directory, capsys):
    for step in (10, 20, 30, 40):
        damage(directory / str(step))
    assert main(["prune", str(directory)]) == 1
    assert "nothing was deleted" in capsys.readouterr().err
    assert (directory / "40").exists()


def test_wrong_use(tmp_path, capsys, directory):
    assert main(["verify", str(tmp_path / "absent")]) == 2
    assert "not a directory" in capsys.readouterr().err
    assert main(["prune", str(directory), "--keep", "0"]) == 2
    with pytest.raises(SystemExit) as caught:
        main(["polish", str(directory)])
    assert caught.value.code == 2


def test_help_is_quick_because_it_loads_no_jax(run_python):
    result = run_python(
        "import sys, jaxstack.checkpoint.__main__ as command\n"
        "try:\n    command.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('jax', 'numpy', 'orbax', 'pydantic') if name in sys.modules])"
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_a_folder_of_runs_is_no_run(tmp_path, capsys):
    (tmp_path / "first" / "checkpoints").mkdir(parents=True)
    assert main(["list", str(tmp_path)]) == 2
    assert "holds runs (first): give one of them" in capsys.readouterr().err
