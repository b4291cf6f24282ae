"""Small real runs in processes of their own, alone or under the launcher, and a look at what they do."""

import copy
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from jaxstack.launch.child import descendants
from tests.heartbeats import without_heartbeats

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = """
model: {{hidden_size: 16, num_layers: 1, num_heads: 2, intermediate_size: 32}}
data:
  {{tokenizer: {{name: byte}}, held_out_fraction: 0.1, sources: [{{path: {texts}}}], cache_dir: {tokens}}}
train: {{steps: 16, global_batch_size: 4, sequence_length: 32, eval_every_steps: 10, eval_tokens: 256}}
optimizer: {{learning_rate: 1e-2}}
schedule: {{name: constant, warmup_steps: 0}}
parallel: {{simulate_devices: 4, data: -1}}
checkpoint: {{every_steps: 5, keep: 100}}
observe: {{log_every: 1, trackers: [jsonl]}}
resilience: {{checksum_every_steps: 5}}
run: {{dir: {folder}}}
"""
TRAIN = (sys.executable, "-m", "jaxstack.train")
FAULTY = (sys.executable, "-m", "tests.reliability.faulty_train")


class Runs:
    """Runs that share data and compiled steps.

    Attributes:
      folder: where their run directories are.
      texts: the texts that they are trained on.
    """

    def __init__(self, folder: Path):
        self.texts = texts = folder / "texts"
        texts.mkdir()
        source = "".join((REPOSITORY / "jaxstack" / name).read_text() for name in ("loop.py", "step.py"))
        for index, start in enumerate(range(0, len(source), 700)):
            (texts / f"{index}.txt").write_text(source[start : start + 700])
        self._tokens = folder / "tokens"
        self._use(folder)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"},
            "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache"),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }  # fmt: skip

    def _use(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "small.yaml"
        self.config.write_text(CONFIG.format(folder=folder, texts=self.texts, tokens=self._tokens))

    def below(self, name: str) -> "Runs":
        """Runs with the same data and compiled steps, in a folder of their own: no name of theirs is taken."""
        other = copy.copy(self)
        (self.folder / name).mkdir(exist_ok=True)
        other._use(self.folder / name)
        return other

    def train(self, name: str, *overrides: str, command: Sequence[str] = TRAIN) -> list[str]:
        """The command of a run."""
        return [*command, "--config", str(self.config), f"run.name={name}", *overrides]

    def launch(
        self, options: Sequence[str], command: Sequence[str], output: IO | None = None, **variables: str
    ) -> subprocess.Popen:
        """Starts the launcher."""
        return self.start([sys.executable, "-m", "jaxstack.launch", *options, "--", *command], output, **variables)

    def start(self, command: Sequence[str], output: IO | None = None, **variables: str) -> subprocess.Popen:
        """Starts a command whose output is kept in one text, or goes to an open file."""
        return subprocess.Popen(
            command, cwd=REPOSITORY, env={**self.environment, **variables}, text=True,
            stdout=output or subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def lines(self, name: str) -> list[dict]:
        """The complete lines of a run's metrics."""
        try:
            text = (self.folder / name / "metrics.jsonl").read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def losses(self, name: str) -> dict[int, float]:
        """Step -> loss; no step stands twice."""
        found = [(line["step"], line["loss"]) for line in self.lines(name) if "loss" in line]
        assert len(dict(found)) == len(found), "a step stands twice"
        return dict(found)

    def saved(self, name: str) -> list[int]:
        """The steps of the checkpoints on disk."""
        folder = self.folder / name / "checkpoints"
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.exists() else []

    def wait_for_step(self, process: subprocess.Popen, name: str, step: int) -> None:
        """Until the run has logged a step."""
        for _ in waiting(process):
            if any(line["step"] >= step for line in self.lines(name)):
                return

    def wait_for_checkpoint(self, process: subprocess.Popen, name: str) -> None:
        """Until the run has a checkpoint, which is written beside the steps after it."""
        for _ in waiting(process):
            if self.saved(name):
                return


def waiting(process: subprocess.Popen, seconds: float = 240) -> Iterator[None]:
    """Rounds of 10 ms while a process runs; fails where it ends or the time is over."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        yield
        time.sleep(0.01)
    if process.poll() is None:
        end(process)
    raise AssertionError(f"what was waited for did not come: {process.communicate()[0]}")


def read_until(process: subprocess.Popen, *patterns: str) -> list[str]:
    """The output up to the line that has the last of the patterns, which come in this order."""
    said = []
    wanted = list(patterns)
    for line in process.stdout or ():
        said.append(line)
        while wanted and re.search(wanted[0], line):
            wanted.pop(0)
        if not wanted:
            return said
    raise AssertionError(f"{wanted[0]!r} did not come: {''.join(said)}")


def finish(process: subprocess.Popen, seconds: float = 240) -> tuple[int, str]:
    """Exit code and output."""
    try:
        output = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        end(process)
        raise AssertionError(f"it did not end within {seconds} s: {process.communicate()[0]}") from None
    return process.returncode, without_heartbeats(output)


def end(process: subprocess.Popen) -> None:
    """Ends a process and all below it."""
    for pid in [*descendants(process.pid), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def ranks(launcher: subprocess.Popen, *, required: bool = True) -> dict[int, int]:
    """Rank -> process id, of a launcher's processes; fails with what it said where none is running, if one must be."""
    found = {}
    for pid in descendants(launcher.pid):
        named = environment_of(pid)
        if "JAXSTACK_PROGRESS_FILE" in named:
            found[int(named.get("JAX_PROCESS_ID", "0"))] = pid
    if not found and required:
        end(launcher)
        raise AssertionError(f"no rank is running: {launcher.communicate()[0]}")
    return found


def environment_of(pid: int) -> dict[str, str]:
    """The environment variables of a process; {} if it has ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(one.partition("=")[::2] for one in os.fsdecode(variables).split("\0"))


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(pid: int | str = "self") -> list[str]:
    """The addresses that a process listens on, as the kernel tells them: `ADDRESS:PORT`."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and words[9] in inodes:
                found.append(_address(words[1]))
    return sorted(found)


def _address(words: str) -> str:
    """The kernel's `0100007F:1F90` as an address."""
    digits, port = words.split(":")
    raw = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return f"{mapped or address}:{int(port, 16)}"
