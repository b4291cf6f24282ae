"""Row 14: malformed safetensors files are refused, fast and without memory."""

import json
import pickle
import resource
import shutil
import struct
import time
from pathlib import Path

import pytest

from jaxstack.errors import ConfigError
from jaxstack.models.huggingface import load
from jaxstack.models.huggingface.files import WeightFiles
from tests.reliability.runs import REPOSITORY

MODEL = REPOSITORY / "tests" / "models" / "huggingface" / "llama"


def malformed(good: bytes) -> dict[str, bytes]:
    """What is wrong -> a file."""
    (size,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + size])
    body = good[8 + size :]
    names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    first = names[0]
    second = names[1]
    last = names[-1]
    begin, end = header[first]["data_offsets"]

    def file(text: str | bytes, content: bytes = body) -> bytes:
        text = text.encode() if isinstance(text, str) else text
        return struct.pack("<Q", len(text)) + text + content

    def changed(name: str, **fields) -> bytes:
        return file(json.dumps({**header, name: {**header[name], **fields}}))

    text = json.dumps(header)
    return {
        "nothing": b"",
        "seven bytes": good[:7],
        "a header of 2^60 bytes": struct.pack("<Q", 2**60) + good[8:],
        "a header beyond the end": struct.pack("<Q", len(good)) + good[8:],
        "a header that is cut": file(text[:-1]),
        "a header that is not UTF-8": file(b"\xff" + text.encode()[1:]),
        "a header that is a list": file("[1]"),
        "a header of a hundred thousand brackets": file("[" * 100_000),
        "negative offsets": changed(first, data_offsets=[-4, end]),
        "offsets that overlap": changed(second, data_offsets=header[first]["data_offsets"]),
        "offsets beyond the end": changed(last, data_offsets=[v + 2**40 for v in header[last]["data_offsets"]]),
        "offsets backwards": changed(first, data_offsets=[end, begin]),
        "a hole between tensors": changed(first, data_offsets=[begin + 1, end]),
        "a shape that is too large": changed(first, shape=[2**62, 2**62]),
        "a shape of other size": changed(first, shape=[1]),
        "a negative shape": changed(first, shape=[-1]),
        "an unknown dtype": changed(first, dtype="F7"),
        "data that is cut": good[:-1],
        "data after the end": good + b"\0",
        "a pickle": pickle_bytes(),
    }


def pickle_bytes() -> bytes:
    """What torch files hold, under the name of a safetensors file."""
    return pickle.dumps({"weight": list(range(1000))})


def refusal(directory: Path) -> str:
    """The message with which the weights of a directory are refused."""
    with pytest.raises(ConfigError) as caught:
        files = WeightFiles(directory)
        pytest.fail(f"{directory.name} was opened: {len(files.shapes)} tensors")
    return str(caught.value)


def test_malformed_files_are_refused(tmp_path, record):
    good = (MODEL / "model.safetensors").read_bytes()
    assert WeightFiles(MODEL).shapes, "the file that they are made from is read"
    cases = malformed(good)
    slowest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what, content in cases.items():
        directory = tmp_path / what.replace(" ", "-")
        shutil.copytree(MODEL, directory)
        (directory / "model.safetensors").write_bytes(content)
        began = time.process_time()
        said = refusal(directory)
        slowest = max(slowest, time.process_time() - began)
        assert "model.safetensors is damaged or not a safetensors file" in said and "fetch it again" in said, what
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert slowest < 1 and grown < 32
    figure = f"{len(cases)} refused, each within {slowest:.2f} s; memory grew by {grown:.1f} MiB"
    record(14, f"{len(cases)} malformed safetensors files", figure)


def test_a_header_that_promises_much_is_not_believed(tmp_path):
    """Well formed, but with other shapes than config.json says: refused before anything is read."""
    directory = tmp_path / "large"
    shutil.copytree(MODEL, directory)
    good = (MODEL / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", good[:8])
    header = json.loads(good[8 : 8 + size])
    name = next(n for n in header if n != "__metadata__")
    count = 1
    for dim in header[name]["shape"]:
        count *= dim
    header[name]["shape"] = [count, 1]
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + good[8 + size :])
    with pytest.raises(ConfigError, match="1 shapes differ"):
        load.from_huggingface(directory)
