"""Isolation of a process by the Linux kernel: namespaces, a root of its own, no capabilities, a filter of system calls.

The calls that the C library has no function for go by their numbers, on x86-64 and ARM64. Standard library only.
"""

import ctypes
import os
import platform
import signal
import stat
import struct
import sys
from collections.abc import Mapping
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

_CLONE_NEWTIME = 0x80
_CLONE_THREAD = 0x10000
_CLONE_NEWNS = 0x20000
_CLONE_NEWCGROUP = 0x2000000
_CLONE_NEWUTS = 0x4000000
_CLONE_NEWIPC = 0x8000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_MNT_DETACH = 2
_RDONLY_ATTR = 1
_NOSUID_ATTR = 2
_NODEV_ATTR = 4
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38

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


def install_filter(isolation: Isolation) -> None:
    """Have the kernel filter the system calls of this process and of all that it starts, for good."""

    class FilterProgram(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    code = _filter(isolation, os.getpid())
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_SECCOMP, 2, ctypes.byref(FilterProgram(len(code) // 8, code)), 0, 0)


def _filter(isolation: Isolation, pid: int) -> bytes:
    """Return the seccomp filter of a program, in the instructions of the classic Berkeley packet filter.

    Args:
      isolation: how it is kept apart.
      pid: the process that it may send signals to, with isolation by process.
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    load = 0x20
    jump_equal = 0x15
    jump_over = 0x35
    jump_any = 0x45
    answer = 0x06
    allow = 0x7FFF0000
    refuse = 0x50000 | 1  # EPERM
    missing = 0x50000 | 38  # ENOSYS
    kill = 0x80000000

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


def _mount(source: str, place: str, kind: str | None, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), place.encode(), kind and kind.encode(), ctypes.c_ulong(flags), data.encode())


def _protect(place: str, attributes: int, *, below: bool = True) -> None:
    """Set attributes of a mount, and of the mounts below it."""
    values = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if below else 0
    _system_call("mount_setattr", _AT_FDCWD, place.encode(), flags, values, ctypes.c_size_t(len(values)))


def isolation_problem() -> str | None:
    """Return why no isolation is possible on this machine; None if some is."""
    if sys.platform == "linux" and platform.machine() in _ARCHITECTURES:
        return None
    return f"a sandbox needs Linux on x86-64 or ARM64; this is {sys.platform} {platform.machine()}"


def enter_namespaces(user: int) -> None:
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
            become(user)
            _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)
    own = os.geteuid()
    group = os.getegid()
    _call("unshare", spaces | _CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{own} {own} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def become(user: int) -> None:
    """Make this process, which must be root's, one of another user and group, with no way back."""
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


def make_root(root: str) -> None:
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


def mount_folder(mebibytes: int, owner: int | None) -> None:
    """Mount an empty /tmp in memory, for `owner` alone (None: the user of this process)."""
    options = f"size={mebibytes}m,nr_inodes=4096,mode=700"
    if owner is not None:
        options += f",uid={owner},gid={owner}"
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def fork_apart() -> int:
    """Fork as `os.fork` does; the child is process 1 of process numbers of its own, and has mounts of its own."""
    return _system_call("clone", _CLONE_NEWPID | _CLONE_NEWNS | signal.SIGCHLD, 0, 0, 0, 0)


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def readable_by_all() -> bool:
    """Return True if any user can read the standard library."""
    place = Path(os.__file__).resolve()
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in place.parents) and bool(
        place.stat().st_mode & stat.S_IROTH
    )


def drop_capabilities() -> None:
    """Give up all capabilities, such as those that a user namespace brings."""
    header = struct.pack("=II", 0x20080522, 0)
    _call("capset", header, bytes(24))
