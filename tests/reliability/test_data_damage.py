"""Row 10: a token shard that is damaged before or during a run is an error that names it, and no SIGBUS."""

import os
import random
import subprocess
import sys

import pytest

from jaxstack.data.build_shards import BuildOptions, prepare_tokens
from jaxstack.data.config import SourceConfig
from jaxstack.data.shards import open_split, read_index
from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.errors import JaxstackError
from tests.data.test_shards import DAMAGE, flip
from tests.reliability.runs import REPOSITORY

READ_ALL_THE_TIME = """
import sys
from pathlib import Path
from jaxstack.cli import run_command
from jaxstack.data.shards import open_split, read_index

def body():
    folder = Path(sys.argv[1])
    stream = open_split(folder, read_index(folder), "train")
    place = 0
    while True:
        stream.read(place, 512)
        if place == 0:
            print("reading", flush=True)
        place = (place + 511) % (stream.tokens - 512)

sys.exit(run_command("reader", body))
"""


@pytest.fixture
def prepared(tmp_path):
    """A few shards of our own sources."""
    text = (REPOSITORY / "jaxstack" / "loop.py").read_text()
    (tmp_path / "text").mkdir()
    for i in range(0, len(text), 500):
        (tmp_path / "text" / f"{i}.txt").write_text(text[i : i + 500])
    source = SourceConfig(path=str(tmp_path / "text"))
    prepare_tokens([source], tmp_path / "tokens", ByteTokenizer(), 0.05, BuildOptions(shard_tokens=3000))
    return tmp_path / "tokens"


def test_damaged_shards_are_named(prepared, record, full):
    """Each kind of damage; and single bits anywhere, with the old times set again."""
    shards = sorted(prepared.glob("train-*.bin"))
    whole = {path: path.read_bytes() for path in shards}
    chance = random.Random(10)
    cases = 0

    def check(victim):
        with pytest.raises(JaxstackError, match=rf"token shard .*{victim.name}"):
            open_split(prepared, read_index(prepared), "train")
        victim.rmdir() if victim.is_dir() else victim.unlink(missing_ok=True)
        victim.write_bytes(whole[victim])

    for damage in DAMAGE.values():
        victim = chance.choice(shards[:-1])
        damage(victim)
        check(victim)
        cases += 1
    for _ in range(100 if full else 10):
        victim = chance.choice(shards)
        times = victim.stat()
        flip(victim)
        os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
        (prepared / ".verified.json").unlink(missing_ok=True)
        check(victim)
        cases += 1
    open_split(prepared, read_index(prepared), "train")
    record(
        10, "token shards cut, flipped, of odd length, missing", f"{cases} cases, each an error that names the shard"
    )


def test_a_shard_cut_while_it_is_read(prepared, record):
    """A process that reads, as a run does; the file shrinks under it."""
    reader = subprocess.Popen(
        [sys.executable, "-c", READ_ALL_THE_TIME, str(prepared)],
        cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert reader.stdout is not None and reader.stdout.readline() == "reading\n"
    os.truncate(prepared / "train-00001.bin", 100)
    said = reader.communicate(timeout=60)[1]
    assert reader.returncode == 1 and "train-00001.bin" in said and "became shorter" in said and "Traceback" not in said
    record(10, "a token shard cut while it is read", "exit code 1 and one message with its name, no SIGBUS")
