"""The supervisor with small programs in place of training: exit codes, orphans, /dev/shm, signals."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxstack.launch.__main__ import check_shadowing, main
from jaxstack.launch.cleanup import FOLDER, list_files, remove_left_behind

WRITE = (
    "import os, sys, time; from jaxstack.resilience.progress_file import ProgressFile; "
    "p = ProgressFile.of_this_process(); "
)


def launch(*options: str, program: str, **variables: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "jaxstack.launch", *options, "--", sys.executable, "-c", program]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")} | variables
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_needs_no_jax():
    program = "import sys, jaxstack.launch.__main__; print(sorted({'jax', 'numpy', 'flax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.quick
def test_success_and_the_place_of_each_process():
    program = "import os; print(os.environ['JAX_PROCESS_ID'] + ' ' + os.environ['JAX_NUM_PROCESSES'])"
    out, _ = (process := launch("--processes", "2", program=program)).communicate(timeout=60)
    assert process.returncode == 0 and "0 2" in out and "[1] 1 2" in out


PLACE = "from jaxstack.distributed.cluster import find_place; print('place', find_place())"
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[0-1]"}


def test_a_single_process_does_not_take_its_place_from_slurm():
    assert "place None" in launch(program=PLACE, **STEP).communicate(timeout=60)[0]


def test_a_process_knows_its_node():
    """As `serve --replicas` does, of which the first node alone starts the router."""
    program = "from jaxstack.distributed.cluster import find_nodes; print(find_nodes())"
    options = ("--nodes", "2", "--node-rank", "1", "--coordinator", "127.0.0.1:1")
    assert "Nodes(count=2, rank=1, coordinator='127.0.0.1:1')" in launch(*options, program=program).communicate()[0]


@pytest.mark.exhaustive
def test_a_process_that_is_left_of_several_does_not_take_its_place_from_slurm(tmp_path):
    """The step still has two tasks after one of its nodes is lost; the launcher waits a minute for the other node."""
    options = [
        "--nodes",
        "1:2",
        "--node-rank",
        "1",
        "--coordinator",
        "127.0.0.1:1",
        "--rendezvous",
        str(tmp_path / "m"),
    ]
    node = launch(*options, program=PLACE, **STEP, SLURM_STEP_NUM_NODES="2", SLURM_NODEID="1")
    assert "place None" in node.communicate(timeout=120)[0]


PARTS = (
    "import sys\n"
    "for number in range(200):\n"
    "    for stream, name in ((sys.stdout, 'out'), (sys.stderr, 'errors')):\n"
    "        for part in (name + f' {number} ', LENGTH * '-', '\\n'): stream.write(part); stream.flush()\n"
    "print('the end', end='', flush=True)"
)


@pytest.mark.parametrize("length", [8, 20_000])
def test_lines_of_several_processes_stay_whole_and_in_order(length):
    """Of output and errors in one pipe, which takes 4 KiB at once; the last line has no end."""
    program = PARTS.replace("LENGTH", str(length))
    out, _ = launch("--processes", "3", program=program, PYTHONUNBUFFERED="1").communicate(timeout=60)
    expected = [f"{name} {number} {length * '-'}" for number in range(200) for name in ("out", "errors")]
    found = {rank: list[str]() for rank in ("", "[1] ", "[2] ")}
    for line in re.split(r"\n|(?<=the end)(?=.)", out):
        rank = line[:4] if line.startswith("[") else ""
        found[rank].append(line.removeprefix(rank))
    assert all(lines == [*expected, "the end"] for lines in found.values())


def test_output_and_errors_of_the_first_process_stay_apart():
    """And with a closed output nothing is lost of the errors."""
    command = [sys.executable, "-m", "jaxstack.launch", "--processes", "2", "--", sys.executable, "-c"]
    program = PARTS.replace("LENGTH", "8")
    done = subprocess.run([*command, program], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == [f"errors {number} --------" for number in range(200)]
    assert done.stdout.count("out ") == 400 and done.stdout.count("[1] errors ") == 200
    closed = subprocess.run(
        ["bash", "-c", 'exec "$@" >&-', "bash", *command, "import os; os.write(2, b'an error\\n')"],
        stderr=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert closed.returncode == 0 and closed.stderr == "an error\n"


@pytest.mark.parametrize(
    ("code", "starts", "expected"), [(2, 1, 2), (1, 2, 1), (143, 1, 143), (130, 1, 130), (129, 1, 129)]
)
def test_exit_codes(code, starts, expected):
    """A wrong configuration is not tried again, nor is a run that was stopped."""
    process = launch("--max-restarts", "1", program=f"print('started'); raise SystemExit({code})")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == expected and out.count("started\n") == starts


WRONG = (
    "import os, sys, time; from jaxstack.cli import run_command; from jaxstack.errors import ConfigError; "
    "rank = int(os.environ['JAX_PROCESS_ID'])\n"
    "def body(): raise ConfigError(TEXT)\n"
    "DELAY; sys.exit(run_command('jaxstack train', body))"
)


def test_a_message_of_all_processes_is_printed_once():
    """Also if one of them comes to it later, and it has several lines."""
    program = WRONG.replace("TEXT", "'a is 1.\\n  b is 2.'").replace("DELAY", "time.sleep(0.3 * rank)")
    out, _ = launch("--processes", "2", program=program).communicate(timeout=60)
    assert out == "jaxstack train: a is 1.\n  b is 2.\n"


@pytest.mark.longer
def test_a_message_of_some_processes_is_printed_once_with_their_ranks():
    program = WRONG.replace("TEXT", "'a is %d.' % min(rank, 1)").replace("DELAY", "rank == 3 and time.sleep(60)")
    out, _ = launch("--processes", "4", program=program).communicate(timeout=60)
    assert out == "[0] jaxstack train: a is 0.\n[1,2] jaxstack train: a is 1.\n"


def test_wrong_usage_of_all_processes_is_printed_once():
    program = "from jaxstack.cli import CommandParser; CommandParser(prog='p', usage='').parse_args(['--x'])"
    out, _ = launch("--processes", "2", program=program).communicate(timeout=60)
    assert out == "p: there is no option --x.\n"


def test_a_message_of_what_a_command_starts_is_not_its_own():
    """Such as a trial of a study, whose output the study reads."""
    program = (
        "import subprocess, sys; from jaxstack.cli import run_command; "
        'wrong = \'from jaxstack.cli import CommandParser; CommandParser(prog="trial").parse_args(["x"])\'; '
        "run_command('tune', lambda: subprocess.run([sys.executable, '-c', wrong]).returncode - 2)"
    )
    out, _ = launch("--processes", "2", program=program).communicate(timeout=60)
    assert sorted(out.splitlines()) == ["[1] trial: unrecognized arguments: x.", "trial: unrecognized arguments: x."]


def test_a_rank_that_was_stopped_by_a_signal_stops_the_run():
    """Before the first step only that one hears of it, and the others fail at its absence."""
    program = (
        "import os, sys, time; print('started', flush=True); first = os.environ['JAX_PROCESS_ID'] == '0'; "
        "time.sleep(2 * first); sys.exit(1 if first else 143)"
    )
    process = launch("--processes", "2", "--max-restarts", "3", program=program)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and out.count("started\n") == 2 and "starting again" not in out


def test_a_new_checkpoint_refills_the_budget(tmp_path):
    """Fails after the checkpoints 1, 2 and 3, then ends well; one restart in a row would not have done."""
    (tmp_path / "n").write_text("0")
    program = WRITE + (
        f"n = int(open('{tmp_path}/n').read()) + 1; open('{tmp_path}/n', 'w').write(str(n)); "
        "p.note('train', step=n, saved=n); sys.exit(n < 4)"
    )
    process = launch("--max-restarts", "1", program=program)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and out.count("starting again") == 3, out


def is_running(pid: int) -> bool:
    """Whether the process runs; one that was ended stays in /proc until its new parent asks for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_failure_is_told_with_its_phase_and_step():
    program = (
        "import os; from jaxstack.resilience.progress_file import ProgressFile, PROGRESS; "
        "file = ProgressFile(os.environ[PROGRESS]); file.note('train', step=7); os.kill(os.getpid(), 9)"
    )
    out, _ = launch("--max-restarts", "0", program=program).communicate(timeout=60)
    assert "rank 0 was ended by SIGKILL in phase 'train' at step 7; nothing is saved" in out


@pytest.mark.quick
def test_no_orphans_and_no_shared_memory_are_left():
    """The grandchild has left its parent's session, which killing the group does not reach."""
    name = f"/dev/shm/jaxstack-test-{os.getpid()}"
    program = (
        "import os, subprocess, sys, time; "
        "print('grandchild', subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True); "
        f"open('{name}', 'w').close(); os.kill(os.getpid(), 9)"
    )
    process = launch("--max-restarts", "0", program=program)
    out, _ = process.communicate(timeout=60)
    grandchild = int(out.split("grandchild ")[1].split()[0])
    assert process.returncode == 1 and "was ended by SIGKILL" in out and "removed 1 file that" in out
    assert not is_running(grandchild) and not Path(name).exists()


def test_children_die_with_a_killed_launcher():
    process = launch(program="import os, time; print('pid', os.getpid(), flush=True); time.sleep(1000)")
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    process.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the child outlives its supervisor"
        time.sleep(0.05)


@pytest.mark.parametrize("killed", [False, True])
def test_the_folder_of_copies_outlives_the_processes_but_not_the_launcher(killed):
    """Both starts have the same private folder; it is removed when the launcher ends, however it ends."""
    program = (
        "import os, sys, time; path = os.environ['JAXSTACK_MEMORY_FOLDER']; found = os.listdir(path); "
        "print(path, oct(os.stat(path).st_mode), *found, flush=True); open(path + '/copy', 'w').close(); "
        f"time.sleep({600 * killed} * len(found)); sys.exit(not found)"
    )
    process = launch("--max-restarts", "1", program=program)
    lines: list[list[str]] = []
    while len(lines) < 2:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the launcher ended early"
        lines += [line.split()] if line.startswith("/dev/shm/") else []
    folder = Path(lines[0][0])
    assert lines == [[str(folder), "0o40700"], [str(folder), "0o40700", "copy"]]
    if killed:
        process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists() and process.returncode == (-signal.SIGKILL if killed else 0)


def test_what_a_shell_started_dies_with_a_killed_launcher():
    """The kernel ends the shell, which has no time to end what stands below it."""
    program = "import subprocess; subprocess.run(['sh', '-c', 'setsid sleep 998 & echo $!; wait'])"
    process = launch(program=program)
    assert process.stdout is not None
    below = int(process.stdout.readline())
    process.kill()
    deadline = time.monotonic() + 20
    while is_running(below):
        assert time.monotonic() < deadline, "it outlives its supervisor"
        time.sleep(0.05)


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace():
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(1000)"
    process = launch("--grace-seconds", "1", program=program)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "did not end within 1 s" in out and time.monotonic() - began < 15


@pytest.mark.parametrize("keeps_a_record", [False, True])
def test_only_the_silence_of_a_process_that_keeps_a_record_counts(keeps_a_record):
    """A server may wait for requests for days."""
    program = "import time; time.sleep(2.5)"
    options = ("--start-seconds", "0.8", "--max-restarts", "0")
    process = launch(*options, program=f"{WRITE}p.note(); {program}" if keeps_a_record else program)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == keeps_a_record, out
    assert ("gave no sign of life" in out) == keeps_a_record


@pytest.mark.longer
def test_a_rank_that_never_begins_is_told_with_the_limit_of_a_start():
    program = (
        f"import os, time; os.environ['JAX_PROCESS_ID'] == '1' and time.sleep(60); {WRITE}p.note(); time.sleep(60)"
    )
    process = launch("--processes", "2", "--start-seconds", "2", "--max-restarts", "0", program=program)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank 1 gave no sign of life for" in out, out
    assert (
        "(limit 2 s); stacks of all processes of this node follow; if it only needs longer, raise --start-seconds"
        in out
    )


@pytest.mark.longer
@pytest.mark.parametrize("context", ["ExitOnSignal('train').__enter__()", "join_job('')"])
def test_training_and_what_joins_a_job_keep_a_record_from_their_begin_on(context):
    imports = "from jaxstack.resilience.exit_on_signal import ExitOnSignal; from jaxstack.run.join import join_job; "
    process = launch("--max-restarts", "0", program=WRITE + imports + f"{context}; print('beat', p.record.beat)")
    assert "beat 1" in process.communicate(timeout=60)[0]


def test_a_ctrl_c_that_comes_twice_at_once_is_one():
    """As from a terminal or a scheduler that signals all processes: the save is not cut off."""
    program = (
        "import signal, sys, time; signal.signal(2, lambda *_: None); print('ready', flush=True); signal.pause()\n"
        "time.sleep(1); print('saved', flush=True); sys.exit(130)"
    )
    process = launch(program=program)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "saved" in out


def test_shared_memory_that_somebody_holds_stays(tmp_path):
    held, free, old = (tmp_path / name for name in ("held", "free", "old"))
    for path in (held, free, old):
        path.write_text("x")
    with held.open():
        assert remove_left_behind({old}, tmp_path) == [free]
    assert held.exists() and old.exists() and not free.exists()


def test_semaphores_of_a_living_process_stay():
    """They are mapped under the name with which they were made, not the one that others find them by."""
    lock: Any = multiprocessing.get_context("spawn").Lock()
    made = FOLDER / f"sem.{lock._semlock.name[1:]}"
    assert made in list_files()
    remove_left_behind(list_files() - {made})
    assert made.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "there is no command to run"),
        (["--nodes", "2", "--", "true"], "given together"),
        (["--nodes", "2", "--node-rank", "2", "--coordinator", "h:1", "--", "true"], "0..1"),
        (["--nodes", "2", "--node-rank", "0", "--coordinator", "10.0.0.1:1", "--", "true"], "--insecure"),
        (["--", "no-such-program"], "cannot be started"),
    ],
)
def test_wrong_use_ends_with_one_message(arguments, said, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown


@pytest.mark.parametrize("kind", ["package", "file"])
def test_a_folder_that_hides_jaxstack_is_named_before_anything_starts(tmp_path, monkeypatch, capsys, kind):
    """`jaxstack launch` in a directory from which `python -m jaxstack.train` would import something else."""
    other = tmp_path / ("jaxstack/__init__.py" if kind == "package" else "jaxstack.py")
    other.parent.mkdir(exist_ok=True)
    other.write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["--", sys.executable, "-X", "dev", "-m", "jaxstack.train", "--config", "x.yaml"]) == 2
    said = capsys.readouterr().err
    named = other.parent if kind == "package" else other
    assert said.count("\n") == 1 and f"{named} hides jaxstack" in said and "`jaxstack train ...`" in said


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "jaxstack.train"],
        ["python3.11", "-P", "-m", "jaxstack.train"],
        ["python", "train.py", "-m", "jaxstack.train"],
        ["jaxstack", "train"],
        ["python", "-m", "other"],
    ],
)
def test_commands_that_import_this_jaxstack_are_let_through(command, tmp_path):
    """A plain folder, such as runs of that name or the parent of a clone, does not hide a package on the path."""
    (tmp_path / "jaxstack").mkdir()
    if command[:3] != ["python", "-m", "jaxstack.train"]:
        (tmp_path / "jaxstack" / "__init__.py").write_text("")
    check_shadowing(command, tmp_path)
    check_shadowing(["python", "-m", "jaxstack.train"], Path(__file__).parents[2])  # the repository itself
