"""The prepare command: exit codes, the same result for any number of workers, going on after kill -9."""

import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxstack.prepare import main
from tests.data.conftest import write_corpus
from tests.marks import longer

COMMAND = [sys.executable, "-m", "jaxstack.prepare"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    write_corpus(folder, 300)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Every visible file of a prepared directory."""
    files = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def arguments(corpus, output, *more):
    return [
        "--source",
        str(corpus),
        "--output",
        str(output),
        "--tokenizer",
        "byte",
        "--shard-tokens",
        "4096",
        *more,
    ]


def test_help_is_fast_and_imports_nothing_heavy():
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--held-out-fraction" in done.stdout
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began < 1  # about 0.1 s
    probe = "import sys, jaxstack.prepare; print(sorted({'numpy', 'jax', 'rich', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stdout.strip() == "[]"


def test_prepares_and_says_what_it_did(corpus, tmp_path, capsys):
    assert main(arguments(corpus, tmp_path / "out", "--workers", "1")) == 0
    said = capsys.readouterr().out
    assert "300 files" in said and "train: " in said and "held_out: " in said and "\x1b" not in said
    assert main(arguments(corpus, tmp_path / "out", "--workers", "1")) == 0
    assert "already prepared" in capsys.readouterr().out
    assert not (tmp_path / "out" / ".work").exists()


@pytest.mark.longer
def test_the_result_does_not_depend_on_the_workers(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxstack.data.tokenization_plan.UNIT_BYTES", 8000)
    assert main(arguments(corpus, tmp_path / "one", "--workers", "1", "--quiet")) == 0
    assert main(arguments(corpus, tmp_path / "three", "--workers", "3", "--quiet")) == 0
    one = content(tmp_path / "one")
    assert one == content(tmp_path / "three") and len(one) > 10


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--held-out-fraction", "1"], "--held-out-fraction is 1.0"),
        (["--workers", "0"], "--workers is 0"),
        (["--shard-tokens", "5"], "--shard-tokens is 5"),
        (["--vocab-size", "5"], "--vocab-size is 5"),
        (["--source", "no/such/file"], "matches no file"),
        (["--tokenizer", "no.json"], "no tokenizer file no.json"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_2(corpus, tmp_path, capsys, more, message):
    assert main(arguments(corpus, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error


def test_an_output_that_is_a_file_is_refused(corpus, tmp_path, capsys):
    (tmp_path / "out").write_text("x")
    assert main(arguments(corpus, tmp_path / "out")) == 2
    assert f"--output must be a directory, which is made if it is missing; {tmp_path}/out is a file." in (
        capsys.readouterr().err
    )


def test_an_output_of_other_data_is_refused(corpus, tmp_path, capsys):
    assert main(arguments(corpus, tmp_path / "out", "--quiet", "--workers", "1")) == 0
    assert main(arguments(corpus, tmp_path / "out", "--quiet", "--held-out-fraction", "0.2")) == 2
    assert "already holds tokens of other" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["1", *longer("2")])
def test_broken_input_is_exit_2(tmp_path, capsys, monkeypatch, workers):
    monkeypatch.setattr("jaxstack.data.tokenization_plan.UNIT_BYTES", 100)
    for i in range(4):
        (tmp_path / f"{i}.jsonl").write_text('{"text": "some text"}\n' * 100)
    (tmp_path / "3.jsonl").write_text('{"text": "some text"}\n' * 100 + "{broken\n")
    assert main(arguments(tmp_path / "*.jsonl", tmp_path / "out", "--workers", workers, "--quiet")) == 2
    assert "3.jsonl" in capsys.readouterr().err


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
import jaxstack.data.tokenization_plan as plan, jaxstack.data.build_shards as build
plan.UNIT_BYTES = 8000
inner = build.tokenize_unit
def slow(*arguments):
    time.sleep(0.1)
    return inner(*arguments)
build.tokenize_unit = slow
from jaxstack.prepare import main
sys.exit(main(sys.argv[1:]))
"""


def start_slow(corpus, output):
    command = [sys.executable, "-c", SLOW, *arguments(corpus, output, "--workers", "1")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, process) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.exhaustive
def test_goes_on_after_kill_9_and_keeps_finished_shards(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxstack.data.tokenization_plan.UNIT_BYTES", 8000)
    assert main(arguments(corpus, tmp_path / "whole", "--workers", "1", "--quiet")) == 0
    output = tmp_path / "killed"
    for shard in ("train-00000.bin", "train-00003.bin", "train-00006.bin"):
        process = start_slow(corpus, output)
        wait_for(output / shard, process)
        process.kill()
        process.communicate()
        assert not (output / "index.json").exists()
    committed = json.loads((output / ".work" / "progress.json").read_text())["shards"]
    before = {s["name"]: (output / s["name"]).stat() for s in committed}
    (output / ".train-00099.bin.1.tmp").write_bytes(b"torn")
    assert len(before) >= 6
    assert main(arguments(corpus, output, "--workers", "2", "--quiet")) == 0
    for name, status in before.items():
        now = (output / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns), f"{name} was written again"
    assert content(output) == content(tmp_path / "whole")
    assert not list(output.glob(".*.tmp"))


def test_a_shard_damaged_after_the_kill_is_redone(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxstack.data.tokenization_plan.UNIT_BYTES", 8000)
    assert main(arguments(corpus, tmp_path / "whole", "--workers", "1", "--quiet")) == 0
    output = tmp_path / "killed"
    process = start_slow(corpus, output)
    wait_for(output / "train-00004.bin", process)
    process.kill()
    process.communicate()
    os.truncate(output / "train-00001.bin", 100)
    (output / ".work" / "unit-000000.json").write_text("torn")
    assert main(arguments(corpus, output, "--workers", "1", "--quiet")) == 0
    assert content(output) == content(tmp_path / "whole")


def test_unfinished_tokens_of_other_input_are_dropped(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jaxstack.data.tokenization_plan.UNIT_BYTES", 8000)
    output = tmp_path / "out"
    process = start_slow(corpus, output)
    wait_for(output / "train-00001.bin", process)
    process.kill()
    process.communicate()
    other = ("--held-out-fraction", "0.3", "--workers", "1")
    assert main(arguments(corpus, output, *other)) == 0
    assert "unfinished tokens of other input" in capsys.readouterr().out
    assert main(arguments(corpus, tmp_path / "fresh", *other, "--quiet")) == 0
    assert content(output) == content(tmp_path / "fresh")


def test_sigterm_exits_143_and_interrupt_130(corpus, tmp_path):
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = start_slow(corpus, tmp_path / str(code))
        wait_for(tmp_path / str(code) / "train-00000.bin", process)
        process.send_signal(number)
        _, error = process.communicate(timeout=20)
        assert process.returncode == code and error.strip() == "stopped; the same command goes on from here"


@pytest.mark.exhaustive
def test_workers_end_when_the_parent_is_killed(tmp_path):
    for i in range(400):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{i}.txt").write_text(f"{i} some words to merge " * 4000)
    command = [
        *COMMAND,
        "--source",
        str(tmp_path / "in"),
        "--output",
        str(tmp_path / "out"),
        "--workers",
        "2",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("needs Linux's /proc")
    wait_for(tmp_path / "out" / ".work" / "unit-000000.json", process)
    workers = [int(c) for c in children.read_text().split()]
    process.kill()
    process.wait()
    assert len(workers) >= 2
    end = time.monotonic() + 15
    while any(running(w) for w in workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [w for w in workers if running(w)]


def running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def test_a_second_process_does_not_write_beside_the_first(corpus, tmp_path, capsys):
    process = start_slow(corpus, tmp_path / "out")
    wait_for(tmp_path / "out" / "train-00000.bin", process)
    assert main(arguments(corpus, tmp_path / "out", "--workers", "1")) == 1
    assert "another process is writing to" in capsys.readouterr().err
    process.kill()
    process.communicate()


def test_a_bar_on_a_terminal_only(corpus, tmp_path):
    parent, child = pty.openpty()
    command = [*COMMAND, *arguments(corpus, tmp_path / "out", "--workers", "1")]
    process = subprocess.Popen(command, stdout=child, stderr=child, env={**os.environ, "TERM": "xterm"})
    os.close(child)
    seen = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.close(parent)
    assert process.wait() == 0 and b"\x1b[" in seen and b"tokenizing" in seen


@pytest.mark.parametrize("more", [["--source", ""], ["--tokenizer", ""]])
def test_empty_options_are_exit_2(corpus, tmp_path, capsys, more):
    with pytest.raises(SystemExit) as ended:
        main(arguments(corpus, tmp_path / "out", *more))
    assert ended.value.code == 2
    assert f"jaxstack prepare: {more[0]} is empty" in capsys.readouterr().err


def test_a_value_that_the_configuration_refuses_is_exit_2(corpus, tmp_path, capsys):
    assert main(arguments(corpus, tmp_path / "out", "--vocab-size", "99999999999999")) == 2
    assert "jaxstack prepare: " in capsys.readouterr().err


def test_no_text_at_all_and_no_place_to_write(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    assert main(arguments(tmp_path / "empty.txt", tmp_path / "out", "--workers", "1")) == 2
    assert "the sources hold no text" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("text")
    assert main(arguments(tmp_path / "a.txt", "/proc/none/out", "--workers", "1")) == 1
    assert "cannot write to /proc/none/out" in capsys.readouterr().err


@pytest.mark.parametrize("place", [".", "shards", "../texts/deep/shards"])
def test_output_inside_of_the_source_is_refused(tmp_path, place, capsys):
    texts = tmp_path / "texts"
    write_corpus(texts, 3)
    before = content(texts)
    assert main(arguments(texts, texts / place)) == 2
    assert "would be read as text the next time" in capsys.readouterr().err
    assert content(texts) == before


def test_records_without_text_are_counted(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n{"text": "some text"}\n')
    assert main(arguments(path, tmp_path / "out", "--held-out-fraction", "0")) == 0
    assert "1 document without text (null or empty) was left out" in capsys.readouterr().out
