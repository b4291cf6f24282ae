"""The commit that a result row is measured at, and the files that differ from it.

    python benchmarks/sources.py --seal benchmarks/commit.json

A machine that has the files of a checkout but not its git history cannot ask git. The command writes the commit and the
git object id of each of its files to a manifest; where there is no git, `read_sources` compares the files with that.
"""

import argparse
import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "benchmarks" / "commit.json"
RESULTS_FOLDER = "benchmarks/results/"
"""Rows are appended here while benchmarks run, so these files may differ from the commit."""
CODE = ("jaxstack", "pallas_kernels", "benchmarks")
"""Folders in which a Python file that the commit does not have counts as a difference."""


@dataclass(frozen=True)
class Sources:
    """A commit and the paths of the files that differ from it. `commit` is None if it is not known."""

    commit: str | None
    differing: tuple[str, ...] = ()


def read_sources(root: Path = ROOT, manifest: Path = MANIFEST) -> Sources:
    """Return the commit of a checkout and what differs from it, from git or else from the manifest."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is not None:
        return Sources(commit.strip(), tuple(sorted(_differing_in_git(root))))
    if not manifest.exists():
        return Sources(None)
    sealed = json.loads(manifest.read_text(encoding="utf-8"))
    return Sources(sealed["commit"], tuple(sorted(_differing_from_manifest(root, sealed["files"]))))


def seal(path: Path, root: Path = ROOT) -> None:
    """Write the manifest of the current commit.

    Raises:
        SystemExit: There is no git repository.
    """
    commit = _git(root, "rev-parse", "HEAD")
    listing = _git(root, "ls-tree", "-r", "-z", "HEAD")
    if commit is None or listing is None:
        raise SystemExit(f"sources.py: {root} is not a git repository with a commit.")
    files = {}
    for entry in filter(None, listing.split("\0")):
        (_, kind, object_id), name = entry.split("\t", 1)[0].split(), entry.split("\t", 1)[1]
        if kind == "blob":
            files[name] = object_id
    path.write_text(json.dumps({"commit": commit.strip(), "files": files}), encoding="utf-8")


def _differing_in_git(root: Path) -> Iterable[str]:
    changed = _git(root, "diff", "--name-only", "-z", "HEAD") or ""
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *CODE) or ""
    yield from (name for name in changed.split("\0") if name and not name.startswith(RESULTS_FOLDER))
    yield from (name for name in untracked.split("\0") if name.endswith(".py"))


def _differing_from_manifest(root: Path, files: Mapping[str, str]) -> Iterable[str]:
    for name, object_id in files.items():
        path = root / name
        if not name.startswith(RESULTS_FOLDER) and (not path.is_file() or _object_id(path) != object_id):
            yield name
    for folder in CODE:
        names = (path.relative_to(root).as_posix() for path in (root / folder).rglob("*.py"))
        yield from (name for name in names if name not in files)


def _object_id(path: Path) -> str:
    """Git's object id of a file's content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def main() -> None:
    """Write the manifest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seal", type=Path, required=True, metavar="FILE", help="manifest to write")
    seal(parser.parse_args().seal)


if __name__ == "__main__":
    main()
