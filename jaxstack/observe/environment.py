"""Describes the environment of a run, as `environment.json` records it: package versions, devices, flags."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import jaxstack
from jaxstack.files import write_file

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")
# Only these variables are recorded, never the whole environment, which contains keys and tokens.
_VARIABLES = re.compile(
    r"XLA_FLAGS|XLA_PYTHON_CLIENT_\w+|JAX_\w+|NCCL_\w+|CUDA_VISIBLE_DEVICES|TF_CPP_MIN_LOG_LEVEL|OMP_NUM_THREADS"
    r"|LIBTPU_INIT_ARGS|SLURM_(JOB_ID|JOB_NAME|JOB_NUM_NODES|NNODES|NTASKS|JOB_PARTITION)"
)
_SECRET = re.compile(
    r"(^|[._-])(token|secret\w*|passw\w*|credentials?|auth|(api|access|private)[_-]?key)($|[._-])",
    re.IGNORECASE,
)
HIDDEN = "(hidden)"


def describe_environment() -> dict[str, Any]:
    """Return package versions, devices, host, commit, flags and command line of this process, as plain JSON.

    Initializes the JAX backend. Secrets are left out: only listed environment variables are recorded, and values of
    arguments that look like a key, a token or a password are replaced by `(hidden)`.
    """
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": installed_versions(),
        "platform": devices[0].platform,
        "devices": len(devices),
        "device_kinds": kinds,
        "processes": jax.process_count(),
        "hostname": socket.gethostname(),
        "system": platform.platform(),
        "cpu_count": os.cpu_count(),
        "directory": os.getcwd(),
        "commit": git_commit(),
        "command": shlex.join(hide_secrets([Path(sys.executable).name, *sys.argv])),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _SECRET.search(name)
        },
    }


def write_environment(run_dir: str | Path, **sections: Any) -> dict[str, Any]:
    """Write `environment.json`, with this process's package versions, devices and flags, into a run directory.

    Args:
      run_dir: the run directory.
      **sections: added to `describe_environment()`. The report shows `ran` (what actually ran) and draws `schedule`
        (pairs of step and learning rate).

    Returns:
      The content that was written.
    """
    content = describe_environment() | sections
    path = Path(run_dir) / "environment.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(content, indent=2, default=str) + "\n").encode(), durable=False)
    return content


def installed_versions() -> dict[str, str]:
    """Return the versions, by name, of Python, jaxstack and the installed packages among `PACKAGES`."""
    versions = {"jaxstack": jaxstack.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_commit(directory: str | Path = ".") -> str | None:
    """Return the git commit of a directory, with `-dirty` if tracked files differ; None without git."""
    commit = _git(directory, "rev-parse", "HEAD") or os.environ.get("GIT_COMMIT")
    if not commit:
        return None
    return commit + ("-dirty" if _git(directory, "status", "--porcelain", "--untracked-files=no") else "")


def _git(directory: str | Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def hide_secrets(arguments: Sequence[str]) -> list[str]:
    """Replace the values of secret-looking command line arguments: `--token X`, `api_key=X`, `://user:X@host`."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        elif equals and _SECRET.search(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(re.sub(r"://[^/\s@]+@", f"://{HIDDEN}@", argument))
        hide_next = argument.startswith("-") and not equals and bool(_SECRET.search(argument))
    return shown


def read_environment(run_dir: str | Path) -> Mapping[str, Any]:
    """Read `environment.json` of a run; empty if it is missing or not a JSON object."""
    try:
        content = json.loads((Path(run_dir) / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
