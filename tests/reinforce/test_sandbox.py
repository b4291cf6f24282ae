"""The sandbox against programs that want out, that want to stay, and that want to pass without doing the work."""

import os
import time
from pathlib import Path

import pytest

from jaxstack.reinforce.sandbox import Limits, Program, Ran, Sandbox, SandboxError

MARK = "variable-of-the-trainer"
LIMITS = Limits(seconds=1.0, memory=256, processes=8, folder=4, output=1 << 16)

ATTACKS = {
    "loop": "while True:\n try:\n  while True: pass\n except BaseException: pass",
    "memory": "x = bytearray(1 << 30)",
    "recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): return [f()]\nf()",
    "leave": "import os; os._exit(0)",
    "exit": "import sys; sys.exit(0)",
    "marker": 'import os\nfor fd in range(1, 9):\n try: os.write(fd, b\'["value", 2]\\n["end", null]\\n\')\n'
    " except OSError: pass\nos._exit(0)",
    "flood": "import os\nwhile True: os.write(3, b'x' * 65536)",
    "socket": "import socket; socket.socket()",
    "kill": "import os, signal\nfor pid in (os.getppid(), -1, TRAINER):\n try: os.kill(pid, signal.SIGKILL)\n"
    " except OSError: pass",
    "ptrace": "import ctypes; c = ctypes.CDLL(None, use_errno=True)\nassert c.ptrace(16, TRAINER, 0, 0) == -1\n"
    "assert c.unshare(0x10000000) == -1 and c.mount(b'none', b'/', None, 0, None) == -1\n1 / 0",
    "environment": "import os, glob\nfound = str(dict(os.environ))\nfor path in glob.glob('/proc/[0-9]*/environ'):\n"
    " try: found += open(path, errors='replace').read()\n except OSError: pass\nassert MARK not in found",
    "write": "import os\ndef wrong(f, *args):\n try: f(*args)\n except OSError: return True\n"
    "assert wrong(open, PLACE, 'w') and wrong(open, '/usr/x', 'w') and wrong(os.mkdir, os.path.dirname(PLACE) + '/y')\n"
    "assert wrong(os.unlink, PLACE[:-1] + 'kept') and wrong(os.chmod, os.path.dirname(PLACE), 0)",
}
STAYS = {
    "bomb": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "daemon": "import os, time\nif not os.fork():\n os.setsid()\n if not os.fork(): time.sleep(100)\n os._exit(0)",
    "fill": "import os\nfor i in range(99):\n open(f'f{i}', 'wb').write(b'x' * (1 << 20))",
}


def processes_of_programs() -> int:
    """Number of processes of sandboxes."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += b"reinforce.sandbox_worker" in path.read_bytes()
        except OSError:
            continue
    return found


def run_attacks(attacks: dict[str, str], isolation, place: Path) -> dict[str, Ran]:
    """Run attacks, of which none may pass its test `f(1) == 2`, and check that nothing is left of them."""
    names = {"TRAINER": str(os.getpid()), "MARK": repr(MARK), "PLACE": repr(str(place / "x"))}
    programs = []
    for code in attacks.values():
        for name, value in names.items():
            code = code.replace(name, value)
        programs.append(Program(f"{code}\ndef f(x): return x + 1", [("value", "f(1)")]))
    before = processes_of_programs()
    with Sandbox(LIMITS, isolation, workers=2) as box:
        start = time.monotonic()
        found = dict(zip(attacks, box(programs), strict=True))
        assert time.monotonic() - start < 30
        assert box([Program("", [("value", "1 + 1")])])[0] == Ran([(True, 2)])
        assert processes_of_programs() == before + 2
    assert processes_of_programs() == before
    return found


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TRAINERS_VARIABLE", MARK)
    (tmp_path / "kept").write_text("kept")
    return tmp_path


@pytest.mark.parametrize("isolation", ["namespaces", pytest.param("process", marks=pytest.mark.longer)])
def test_attacks_fail(isolation, place):
    try:
        found = run_attacks({**ATTACKS, **(STAYS if isolation == "namespaces" else {})}, isolation, place)
    except SandboxError as error:
        pytest.skip(str(error))
    problems = {name: ran.problem for name, ran in found.items()}
    reached = [name for name, ran in found.items() if ran.steps]
    expected = {
        "loop": "it took more than 1 s",
        "memory": "MemoryError (line 1)",
        "leave": "it ended before its tests did",
        "exit": "it left with SystemExit: 0",
        "marker": "it ended before its tests did",
        "flood": "it wrote more than 65,536 bytes",
        "socket": "PermissionError: [Errno 1] Operation not permitted (line 1)",
        "ptrace": "ZeroDivisionError: division by zero (line 4)",
        "kill": None,
        "write": None,
    }
    assert {name: problems[name] for name in expected} == expected
    assert found["recursion"].problem is not None
    assert list(place.iterdir()) == [place / "kept"]
    if isolation == "namespaces":
        assert problems["bomb"] == "it took more than 1 s"
        assert problems["daemon"] is None
        assert "OSError" in str(problems["fill"])
        assert problems["environment"] is None
        assert set(reached) == {"kill", "write", "environment", "daemon"}


def test_a_program_is_bounded_in_what_it_says():
    """Values cross as plain data: an object that equals everything is none, and expectations stay outside."""
    code = (
        "class Any:\n  def __eq__(self, other): return True\n  def __float__(self): return 2.0\n"
        "class Two(int):\n  def __eq__(self, other): return True\n  def __repr__(self): return '2'\n"
        "def f(x): return {'any': Any(), 'two': Two(3), 'deep': deep()}[x]\n"
        "def deep():\n  x = []\n  for _ in range(10**5): x = [x]\n  return x"
    )
    values = ["f('any')", "f('two')", "f('deep')", "(1, {2.5: {b'x', 'y'}})"]
    with Sandbox(LIMITS, workers=1) as box:
        [ran, echo] = box(
            [Program(code, [("value", x) for x in values]), Program("print(input() * 2)", stdin="ab\n" * 10**5)]
        )
    assert [good for good, _ in ran.steps] == [False, True, False, True]
    assert ran.steps[1][1] == 3
    assert ran.steps[3][1] == (1, {2.5: {b"x", "y"}})
    assert echo == Ran([], "abab\n")
