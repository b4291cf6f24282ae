"""Sandbox: runs programs that nobody has read, such as generated code, in processes with hard limits.

A `Sandbox` holds a few workers, small Python processes without JAX. A worker forks for every program, so that a program
starts within milliseconds, and ends it with everything that it started. What is guaranteed depends on the machine, see
`Isolation`. Nothing that a program sends back is evaluated; expected results never enter its process.

This file is also the script of the workers, and so imports the standard library only. Linux on x86-64 and ARM64.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import math
import numbers
import os
import platform
import queue
import resource
import secrets
import select
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

Isolation = Literal["namespaces", "process"]
"""Isolation of a program from the machine.

Always: limits of time, memory of a process and output; no sockets; no signals to, tracing of or limits for processes
outside; no new privileges; none of the environment variables; it ends with all that it started.

namespaces: it sees only the installation of Python and /usr, read-only, and an empty folder in memory, which vanishes;
at most `processes` processes; it has no process numbers of others, no network interfaces, no /proc.

process: it cannot create, change or delete any file, nor start a process. It can read what the user can read; where the
user is not root, that includes /proc with the environment, and where the kernel does not restrict it the memory, of the
user's other processes.
"""


class SandboxError(RuntimeError):
    """Raised where no sandbox can be made; the message tells why."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
      seconds: time, as on a clock, until the program and all that it started is ended.
      memory: address space of each process, in MiB.
      processes: number of processes and threads at a time.
      folder: size of all files in its folder, in MiB.
      output: bytes that are kept of what it writes to its standard output, after which it is ended.
    """

    seconds: float = 4.0
    memory: int = 512
    processes: int = 16
    folder: int = 32
    output: int = 1 << 20


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and what is wanted of it.

    Attributes:
      code: Python code, executed as a module.
      steps: after it, in the same namespace, pairs of `run` and statements, or of `value` and an expression.
      stdin: text on its standard input; without it there is none, and its output is not kept.
    """

    code: str
    steps: Sequence[tuple[Literal["run", "value"], str]] = ()
    stdin: str | None = None


@dataclasses.dataclass(frozen=True)
class Ran:
    """Result of a program.

    Attributes:
      steps: for each step that was reached either (True, its value) or (False, its exception). Values are None, truth
        values, numbers, texts, bytes, and lists, tuples, sets and dicts of them, of exactly these types; of `run` None.
      output: the beginning of its standard output.
      problem: why the program did not reach its end, such as an exception or its limit of time; None if it did.
    """

    steps: Sequence[tuple[bool, Any]]
    output: str = ""
    problem: str | None = None


class Sandbox:
    """Runs programs on several workers. It holds processes: close it, or use it as a context. Thread-safe.

    Args:
      limits: those of each program.
      isolation: how programs are kept apart; None: namespaces where the machine allows them, or else process.
      workers: programs that run at a time; default: the number of processors.

    Raises:
      SandboxError: the isolation is not available here.
    """

    def __init__(self, limits: Limits | None = None, isolation: Isolation | None = None, workers: int | None = None):
        self._limits = limits or Limits()
        self._workers: list[_Worker] = []
        wanted = isolation
        try:
            for _ in range(workers or len(os.sched_getaffinity(0))):
                self._workers.append(_Worker(self._limits, wanted))
                wanted = self._workers[0].isolation
        except BaseException:
            self.close()
            raise
        self.isolation: Isolation = self._workers[0].isolation
        self._idle = queue.SimpleQueue[_Worker]()
        for worker in self._workers:
            self._idle.put(worker)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, and with them the programs that run."""
        for worker in self._workers:
            worker.close()

    def __call__(self, programs: Sequence[Program]) -> list[Ran]:
        """Run programs and return what they did, in their order. No program makes it raise an exception."""
        with ThreadPoolExecutor(len(self._workers)) as threads:
            return list(threads.map(self._run, programs))

    def _run(self, program: Program) -> Ran:
        worker = self._idle.get()
        try:
            return worker.run(program)
        finally:
            self._idle.put(worker)


class _Worker:
    """The end of a worker in the process that uses the sandbox."""

    def __init__(self, limits: Limits, isolation: Isolation | None):
        self._limits = limits
        self._wanted = isolation
        self._process: subprocess.Popen[bytes] | None = None
        self._root: str | None = None
        self.isolation: Isolation = self._start()

    def _start(self) -> Isolation:
        self._root = tempfile.mkdtemp(prefix="sandbox-")
        os.chmod(self._root, 0o755)
        settings = json.dumps([self._wanted, self._root, dataclasses.asdict(self._limits)])
        # Without the environment, user site and working directory; of the file descriptors only these three.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", __file__, settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", **{name: os.environ[name] for name in _KEPT if name in os.environ}},
            cwd="/",
            start_new_session=True,
        )
        reply = self._receive(_START_SECONDS)
        if reply is None or "error" in reply:
            self.close()
            raise SandboxError((reply or {}).get("error", "its worker did not start"))
        return reply["isolation"]

    def run(self, program: Program) -> Ran:
        """Run a program. A worker that does not answer is started anew for the next one."""
        token = secrets.token_hex(8)
        job = {**dataclasses.asdict(program), "token": token}
        try:
            if self._process is None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
            reply = self._receive(self._limits.seconds + _GRACE_SECONDS)
        except (OSError, SandboxError) as error:
            reply = {"problem": f"its worker failed: {error}"}
            self.close()
        if reply is None:
            self.close()
            return Ran([], problem="its worker did not answer and was ended")
        return _ran(reply, token, len(program.steps))

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the worker's next line, or None if it ends or does not write one in time."""
        assert self._process is not None and self._process.stdout is not None
        place = self._process.stdout.fileno()
        end = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([place], [], [], max(end - time.monotonic(), 0))
            if not ready or not (part := os.read(place, 1 << 16)):
                return None
            line += part
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
        if self._root is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._root)
        self._process = self._root = None


_KEPT = ("LD_LIBRARY_PATH",)
"""Variables of the environment without which Python may not start. Programs do not get them."""
_START_SECONDS = 60.0
_GRACE_SECONDS = 20.0
"""Time for starting a program and ending it, with all processors busy."""


def _ran(reply: Mapping[str, Any], token: str, count: int) -> Ran:
    """Return what a worker tells of a program; of its messages only those that begin with the token count."""
    steps: list[tuple[bool, Any]] = []
    problem = reply.get("problem")
    finished = False
    for line in reply.get("messages", "").splitlines():
        mark, _, text = line.partition(" ")
        if mark != token or finished:
            continue
        try:
            kind, value = json.loads(text)
            match kind:
                case "value":
                    steps.append((True, _unpacked(value)))
                case "error":
                    steps.append((False, str(value)))
                case "failed":
                    problem = problem or str(value)
                case _:
                    finished = True
        except (ValueError, TypeError, RecursionError, KeyError) as error:
            steps.append((False, f"its value cannot be read: {error}"))
    if not finished:
        problem = problem or "it ended before its tests did"
    return Ran(steps[:count], reply.get("output", ""), problem)


def _packed(value: Any) -> Any:
    """Return a value as JSON. Of subclasses only what they share with the plain types is kept.

    Raises:
      TypeError: it has a part of another type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [[_packed(k), _packed(x)] for k, x in dict.items(value)]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            parts: Any = getattr(kind, "__iter__")(value)  # noqa: B009 (not that of a subclass)
            return [kind.__name__, [_packed(x) for x in parts]]
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy
        return _packed(value.tolist())
    if isinstance(value, numbers.Real):
        return ["float", repr(float(value))]
    raise TypeError(f"{type(value).__name__} is no plain value")


def _unpacked(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    match kind:
        case "float":
            return float(content)
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {_unpacked(k): _unpacked(x) for k, x in content}
    makers: Mapping[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return makers[kind](_unpacked(x) for x in content)


# Below is what runs in a worker.

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET, _CLONE_NEWCGROUP, _CLONE_NEWTIME = 0x20000000, 0x40000000, 0x2000000, 0x80
_CLONE_THREAD = 0x10000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_RDONLY_ATTR, _NOSUID_ATTR, _NODEV_ATTR = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

# Numbers of system calls on x86-64 and on ARM64, where they have one.
_CALLS: Mapping[str, tuple[int | None, int | None]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "mount_setattr": (442, 442),
    "pivot_root": (155, 41),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
}
_REFUSED: Mapping[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Memory that no limit of a process counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
}
"""Refused to every program."""
_CHANGES_FILES: Mapping[str, tuple[int | None, int | None]] = {
    "creat": (85, None),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
"""Refused to programs that share the file system with others."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> its column in the tables of system calls, and its number in a filter."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | (os.O_TMPFILE & ~os.O_DIRECTORY)

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> int:
    """Call a function of the C library, which returns -1 on errors.

    Raises:
      OSError: it failed.
    """
    found = getattr(_libc, name)(*arguments)
    if found == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return found


def _system_call(name: str, *arguments: Any) -> int:
    column, _ = _ARCHITECTURES[platform.machine()]
    number = _CALLS[name][column]
    assert number is not None
    return _call("syscall", ctypes.c_long(number), *arguments)


def _filter(isolation: Isolation, pid: int) -> bytes:
    """Return the seccomp filter of a program, in the instructions of the classic Berkeley packet filter.

    Args:
      isolation: how it is kept apart.
      pid: the process that it may send signals to, with isolation by process.
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    load, jump_equal, jump_over, jump_any, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, missing, kill = 0x7FFF0000, 0x50000 | 1, 0x50000 | 38, 0x80000000  # EPERM, ENOSYS

    def instruction(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, true, false, value)

    parts = [instruction(load, 4), instruction(jump_equal, architecture, 1, 0), instruction(answer, kill)]
    parts += [instruction(load, 0), instruction(jump_over, 0x40000000, 0, 1), instruction(answer, kill)]  # x32

    def rule(call: int | None, *then: bytes) -> None:
        if call is not None:
            parts.extend([instruction(jump_equal, call, 0, len(then)), *then])

    def argument(number: int) -> bytes:  # its lower half; all that are compared are 32-bit integers
        return instruction(load, 16 + 8 * number)

    def refused_unless_equal(number: int, value: int) -> list[bytes]:
        end = [instruction(answer, allow), instruction(answer, refuse)]
        return [argument(number), instruction(jump_equal, value & 0xFFFFFFFF, 0, 1), *end]

    def refused_if_any(number: int, bits: int) -> list[bytes]:
        end = [instruction(answer, refuse), instruction(answer, allow)]
        return [argument(number), instruction(jump_any, bits, 0, 1), *end]

    calls = {name: numbers[column] for name, numbers in _CALLS.items()}
    rule(calls["clone3"], instruction(answer, missing))  # its arguments are in memory; libraries then use clone
    for numbers_ in _REFUSED.values():
        rule(numbers_[column], instruction(answer, refuse))
    rule(calls["prlimit64"], *refused_unless_equal(0, 0))
    rule(calls["sched_setaffinity"], *refused_unless_equal(0, 0))
    if isolation == "namespaces":
        new = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNET
        rule(calls["clone"], *refused_if_any(0, new | _CLONE_NEWCGROUP | _CLONE_NEWTIME))
    else:
        for name in ("kill", "tkill", "tgkill"):
            rule(calls[name], *refused_unless_equal(0, pid))
        for name in ("fork", "vfork"):
            rule(calls[name], instruction(answer, refuse))
        threads = [instruction(answer, allow), instruction(answer, refuse)]
        rule(calls["clone"], argument(0), instruction(jump_any, _CLONE_THREAD, 0, 1), *threads)
        rule(calls["open"], *refused_if_any(1, _WRITES))
        rule(calls["openat"], *refused_if_any(2, _WRITES))
        rule(calls["openat2"], instruction(answer, missing))
        for numbers_ in _CHANGES_FILES.values():
            rule(numbers_[column], instruction(answer, refuse))
    return b"".join([*parts, instruction(answer, allow)])


def _install_filter(code: bytes) -> None:
    """Have the kernel apply a seccomp filter to this process and all that it starts, for good."""

    class FilterProgram(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_SECCOMP, 2, ctypes.byref(FilterProgram(len(code) // 8, code)), 0, 0)


def _mount(source: str, place: str, kind: str | None, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), place.encode(), kind and kind.encode(), ctypes.c_ulong(flags), data.encode())


def _protect(place: str, attributes: int, *, below: bool = True) -> None:
    """Set attributes of a mount, and of the mounts below it."""
    values = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if below else 0
    _system_call("mount_setattr", _AT_FDCWD, place.encode(), flags, values, ctypes.c_size_t(len(values)))


def _enter_namespaces(user: int) -> None:
    """Give this process its own mounts, network and interprocess communication.

    Root does without a user namespace, so that programs can run as a user of their own. Where root may not do that, the
    process becomes this user first.
    """
    spaces = _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    if os.geteuid() == 0:
        try:
            _call("unshare", spaces)
            return
        except OSError:
            _become(user)
            _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)
    own, group = os.geteuid(), os.getegid()
    _call("unshare", spaces | _CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{own} {own} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _visible_places() -> list[str]:
    """Return the files and folders that programs may read: Python, its packages, and the system's libraries."""
    wanted = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    wanted |= {"/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"}
    if sys.base_prefix.startswith("/nix/store"):
        wanted.add("/nix/store")
    found: list[str] = []
    for place in sorted(map(os.path.abspath, wanted)):
        if place != "/" and os.path.lexists(place) and not any(place.startswith(f"{parent}/") for parent in found):
            found.append(place)
    return found


def _make_root(root: str) -> None:
    """Make `root` the file system of this process: what `_visible_places` names, a few devices, and an empty /tmp."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for place in _visible_places():
        target = root + place
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(place):
            os.symlink(os.readlink(place), target)
            continue
        if os.path.isdir(place):
            os.makedirs(target, exist_ok=True)
        else:
            Path(target).touch()
        _mount(place, target, None, _MS_BIND | _MS_REC)
        _protect(target, _RDONLY_ATTR | _NOSUID_ATTR | _NODEV_ATTR)
    os.makedirs(f"{root}/dev")
    for device in ("null", "zero", "random", "urandom"):
        Path(f"{root}/dev/{device}").touch()
        _mount(f"/dev/{device}", f"{root}/dev/{device}", None, _MS_BIND)
    os.symlink("/tmp", f"{root}/dev/shm")
    os.makedirs(f"{root}/tmp", exist_ok=True)
    _protect(root, _RDONLY_ATTR, below=False)
    os.chdir(root)
    _system_call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _readable_by_all() -> bool:
    """Return True if any user can read the standard library."""
    place = Path(os.__file__).resolve()
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in place.parents) and bool(
        place.stat().st_mode & stat.S_IROTH
    )


class _Host:
    """A worker: forks for one program after the other.

    Args:
      wanted: the isolation; None: the best that there is.
      root: an empty folder, in which it mounts the file system of the programs.
      limits: those of each program.
    """

    def __init__(self, wanted: Isolation | None, root: str, limits: Limits):
        self._limits = limits
        # Each worker's programs have a user of their own, whose processes the kernel counts.
        self._user = 60_000 + os.getpid() % 5_000
        if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES:
            raise SandboxError(f"a sandbox needs Linux on x86-64 or ARM64; this is {sys.platform} {platform.machine()}")
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        self.isolation: Isolation = "process"
        if wanted != "process":
            # A try leaves its traces, so that it is made in another process first.
            problem = self._try_namespaces(root)
            if problem is None:
                _enter_namespaces(self._user)
                _make_root(root)
                self.isolation = "namespaces"
            elif wanted == "namespaces":
                raise SandboxError(f"namespaces are not available here ({problem})")
        self._privileged = os.geteuid() == 0 and (self.isolation == "namespaces" or _readable_by_all())
        self._identity = self._user if self._privileged else os.geteuid()
        ran = self.run({"code": "", "steps": [["value", "1"]], "stdin": None, "token": "try"})
        if "try [" not in ran["messages"] or ran["problem"] is not None:
            raise SandboxError(f"a program cannot be run: {ran['problem'] or ran['messages']}")

    def _try_namespaces(self, root: str) -> str | None:
        """Return why namespaces cannot be used; None if they can."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _enter_namespaces(self._user)
                _make_root(root)
                child = _system_call("clone", _CLONE_NEWPID | _CLONE_NEWNS | signal.SIGCHLD, 0, 0, 0, 0)
                if child == 0:
                    os._exit(0)
                os.waitpid(child, 0)
                readable = os.path.exists(os.__file__)
                os.write(writing, b"usable" if readable else f"{self._user} cannot read {os.__file__}".encode())
            except BaseException as error:
                os.write(writing, str(error).encode()[:500])
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read().decode()
        os.waitpid(pid, 0)
        return None if told == "usable" else told or "no answer"

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run a program, end it with all that it started, and return what it wrote."""
        keeps_output = job["stdin"] is not None
        pipes = [os.pipe(), os.pipe(), os.pipe()]  # messages, output, input
        pid = self._fork(job, pipes)
        (messages, messages_in), (output, output_in), (stdin_out, stdin) = pipes
        for place in (messages_in, output_in, stdin_out):
            os.close(place)
        text = (job["stdin"] or "").encode() if keeps_output else b""
        kept, problem = self._exchange(pid, {messages: b"", output: b""}, stdin, text)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if problem is None and code != 0:
            problem = (
                f"it was ended by {_signal_name(code)}" if code < 0 or code > 128 else f"it left with exit code {code}"
            )
        return {
            "messages": kept[messages].decode(errors="replace"),
            "output": kept[output].decode(errors="replace"),
            "problem": problem,
        }

    def _exchange(
        self, pid: int, kept: dict[int, bytes], stdin: int, text: bytes
    ) -> tuple[dict[int, bytes], str | None]:
        """Feed a program and read what it writes until it ends; return that, and the limit that it exceeded."""
        end = time.monotonic() + self._limits.seconds
        poll = select.poll()
        process = os.pidfd_open(pid)
        open_places = {*kept, process}
        for place in open_places:
            poll.register(place, select.POLLIN)
        poll.register(0, 0)  # tells when the process that uses the sandbox ends
        os.set_blocking(stdin, False)
        if text:
            poll.register(stdin, select.POLLOUT)
        else:
            os.close(stdin)
        problem = None
        while open_places and problem is None:
            left = end - time.monotonic()
            if left <= 0:
                problem = f"it took more than {self._limits.seconds:g} s"
                break
            for place, event in poll.poll(left * 1000):
                if place == 0:
                    os._exit(1)  # the kernel ends the program with its parent
                elif place == stdin and text:
                    text = _fed(stdin, text) if event & select.POLLOUT else b""
                    if not text:
                        poll.unregister(stdin)
                        os.close(stdin)
                elif place != process and (part := os.read(place, 1 << 16)):
                    kept[place] += part
                    if len(kept[place]) > self._limits.output:
                        problem = f"it wrote more than {self._limits.output:,} bytes"
                else:
                    poll.unregister(place)
                    open_places.discard(place)
        if text:
            os.close(stdin)
        for place in (*kept, process):
            os.close(place)
        return kept, problem

    def _fork(self, job: dict[str, Any], pipes: Sequence[tuple[int, int]]) -> int:
        """Return the process whose end is the end of the program and of all that it started."""
        if self.isolation == "process":
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become_program(job, pipes, parent)
            return pid
        pid = _system_call("clone", _CLONE_NEWPID | _CLONE_NEWNS | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            self._become_first_process(job, pipes)
        return pid

    def _become_first_process(self, job: dict[str, Any], pipes: Sequence[tuple[int, int]]) -> None:
        """Be process 1 of the program: with it the kernel ends all others, whatever they did to get away."""
        code = 1
        try:
            _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != 0:  # of a parent outside
                os._exit(1)
            options = f"size={self._limits.folder}m,nr_inodes=4096,mode=700,uid={self._identity},gid={self._identity}"
            if not self._privileged:
                options = f"size={self._limits.folder}m,nr_inodes=4096,mode=700"
            _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options)
            program = os.fork()
            if program == 0:
                self._become_program(job, pipes, None)
            for pair in pipes:
                for place in pair:
                    os.close(place)
            ended = status = 0
            while ended != program:
                ended, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code
        finally:
            os._exit(code)

    def _become_program(self, job: dict[str, Any], pipes: Sequence[tuple[int, int]], parent: int | None) -> None:
        code = 70
        try:
            if parent is not None:
                _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != parent:
                    os._exit(1)
            self._restrict(job, pipes)
            code = _execute(job)
        except BaseException:
            os.write(_MESSAGES, f"{job['token']} {json.dumps(['failed', traceback.format_exc()[-500:]])}\n".encode())
        finally:
            os._exit(code)

    def _restrict(self, job: dict[str, Any], pipes: Sequence[tuple[int, int]]) -> None:
        """Give up everything that a program shall not have."""
        (_, messages), (_, output), (stdin, _) = pipes
        null = os.open("/dev/null", os.O_RDWR)
        keeps = job["stdin"] is not None
        sources = [stdin if keeps else null, output if keeps else null, null, messages]
        high = [os.dup2(place, 100 + number) for number, place in enumerate(sources)]
        for number, place in enumerate(high):
            os.dup2(place, number, inheritable=number < 3)
        os.closerange(4, 1 << 16)
        os.setsid()
        limits = self._limits
        mebibyte = 1 << 20
        wanted = {
            resource.RLIMIT_AS: limits.memory * mebibyte,
            resource.RLIMIT_CPU: math.ceil(limits.seconds) + 1,
            resource.RLIMIT_FSIZE: limits.folder * mebibyte,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        if self.isolation == "namespaces":
            wanted[resource.RLIMIT_NPROC] = limits.processes + (0 if self._privileged else 2)
        for kind, value in wanted.items():
            resource.setrlimit(kind, (value, value))
        os.umask(0o077)
        os.environ.clear()
        folder = "/tmp" if self.isolation == "namespaces" else "/"
        os.environ.update(PATH="/usr/bin:/bin", HOME=folder, TMPDIR=folder, LANG="C.UTF-8", OMP_NUM_THREADS="1")
        os.chdir(folder)
        if self._privileged:
            _become(self._user)
        _drop_capabilities()
        _install_filter(_filter(self.isolation, os.getpid()))


_MESSAGES = 3
"""File descriptor of a program's messages to its worker."""


def _fed(place: int, text: bytes) -> bytes:
    """Write the beginning of a text to a pipe and return the rest; b"" if nobody reads it."""
    try:
        return text[os.write(place, text[: 1 << 16]) :]
    except BrokenPipeError:
        return b""


def _signal_name(code: int) -> str:
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _drop_capabilities() -> None:
    header = struct.pack("=II", 0x20080522, 0)
    _call("capset", header, bytes(24))


def _execute(job: dict[str, Any]) -> int:
    """Execute a program and its steps, and send the results to the worker; return the exit code of the process."""
    token, write, pack, dump = job["token"], os.write, _packed, json.dumps
    leave = os._exit

    def send(kind: str, value: Any) -> None:
        line = f"{token} {dump([kind, value])}\n".encode()
        while line:
            line = line[write(_MESSAGES, line) :]

    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.argv = ["program.py"]
    steps = job["steps"]
    plain = job["stdin"] is not None
    namespace: dict[str, Any] = {"__name__": "__main__" if plain else "program"}
    code = job.pop("code")
    try:
        exec(compile(code, "program.py", "exec"), namespace)
    except SystemExit as error:
        if not plain or error.code not in (None, 0):
            send("failed", f"it left with SystemExit: {error.code!r:.100}")
            return 0
    except BaseException as error:
        send("failed", _error_text(error))
        return 0
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    for kind, source in steps:
        try:
            if kind == "run":
                exec(compile(source, "tests.py", "exec"), namespace)
                send("value", None)
            else:
                send("value", pack(eval(compile(source, "tests.py", "eval"), namespace)))
        except BaseException as error:
            send("error", _error_text(error))
    send("end", None)
    leave(0)
    return 0


def _error_text(error: BaseException) -> str:
    """Return an exception as one line, with the line of the program that raised it."""
    try:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "program.py"]
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        return text[:300] + (f" (line {lines[-1]})" if lines else "")
    except BaseException:
        return "an exception without a text"


_WARM = (
    "bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math operator "
    "random re statistics string typing"
)
"""Modules that workers import once, so that programs find them in memory."""


def _main() -> None:
    wanted, root, limits = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        host = _Host(wanted, root, Limits(**limits))
    except (SandboxError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    for name in _WARM.split():
        __import__(name)
    gc.freeze()
    os.write(1, json.dumps({"isolation": host.isolation}).encode() + b"\n")
    pending = b""
    while part := os.read(0, 1 << 16):
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            os.write(1, json.dumps(host.run(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    _main()
