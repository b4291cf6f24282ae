"""Files that are either wholly there or not there, also after a kill or a power cut."""

import json
import os
from pathlib import Path


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Writes beside `path`, flushes to the disk, renames into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: object) -> None:
    """`write_file` of `value` as readable JSON."""
    write_file(path, (json.dumps(value, indent=1) + "\n").encode())


def sync_directory(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
