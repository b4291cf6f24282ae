"""Device time of the serving engine's programs, and their kernels' time by kind, for `serve.py --work throughput`."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.training.step_profile import CLASSES, device_events, summarise
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.rows import Column, pad_chunks
from jaxstack.decoding.step_shapes import ChunkShape

CALLS = 5
"""Calls of a program that are timed together."""


def program_rows(engine: Engine, lengths: tuple[int, int], kernels: Path | None = None) -> list[dict[str, Any]]:
    """Time the engine's programs with all slots in use; overwrites the KV cache of an engine without requests.

    On a GPU a row also has the milliseconds of the kernels by kind, from a trace by jax's profiler.

    Args:
      engine: the engine; the requests that it has run determine which shape of chunks is timed.
      lengths: least and largest number of tokens of the sequences that are decoded.
      kernels: folder for a file with each kernel's time, or None.

    Returns:
      A row for a decode step at these lengths, one with empty sequences (it reads the weights only), and one for the
      chunks that most steps with prompts had.
    """
    chunks = {kind: count for kind, count in engine.stats.programs.items() if kind != "decode"}
    cases: list[tuple[str, tuple[int, int], ChunkShape | None]] = [
        ("decode", lengths, None),
        ("decode of empty sequences", (1, 1), None),
    ]
    if chunks:
        most = max(chunks, key=lambda kind: chunks[kind])
        shape = ChunkShape(*map(int, most.removeprefix("chunks ").split("x")))
        cases.append((f"decode and {most}", lengths, shape))
    return [time_program(engine, *case, kernels) for case in cases]


def time_program(
    engine: Engine, name: str, lengths: tuple[int, int], shape: ChunkShape | None, kernels: Path | None
) -> dict[str, Any]:
    """Return the row of one program: a decode step of all slots, with chunks of prompts unless `shape` is None."""
    programs = engine.programs
    rows = decoded_rows(engine, lengths)
    chunks = None if shape is None else programs.table.describe([], shape.rows)
    if chunks is not None and shape is not None:
        # Each row is a chunk at the start of its own prompt.
        chunks[:, Column.COUNT] = shape.width
        chunks[:, Column.PAGES :] = rows[np.arange(shape.rows) % len(rows), Column.PAGES :]
    tokens = None if shape is None else pad_chunks([], shape)

    def call() -> None:
        jax.block_until_ready([programs.run(rows, chunks, tokens, "greedy") for _ in range(CALLS)])

    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        seconds.append((time.perf_counter() - began) / CALLS)
    row = {
        "variant": f"program: {name}, {engine.slots} rows", "milliseconds": 1e3 * min(seconds[1:]),
        "cached_tokens": int(rows[:, Column.START].sum()),
    }  # fmt: skip
    if jax.default_backend() != "gpu":
        return row
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            call()
        # Names of operations contain that of their layer, such as attention, so only kernels' own names are classified.
        events = [(*event[:3], {}) for event in device_events(Path(directory))]
    found, each = summarise(events, CALLS)
    if kernels is not None:
        kernels.mkdir(parents=True, exist_ok=True)
        (kernels / f"{name.replace(' ', '_')}.json").write_text(json.dumps(each, indent=0), encoding="utf-8")
    return row | {kind: found[kind] for kind in (*(kind for kind, _ in CLASSES), "fusions", "idle")}


def decoded_rows(engine: Engine, lengths: tuple[int, int]) -> np.ndarray:
    """Return the int32 descriptions of a row for each slot, with random lengths and pages; see `RowTable.describe`."""
    slots = engine.slots
    random = np.random.default_rng(0)
    rows = engine.programs.table.describe([], slots)
    width = rows.shape[1] - Column.PAGES
    rows[:, Column.SLOT], rows[:, Column.COUNT] = np.arange(slots), 1
    rows[:, Column.START] = random.integers(lengths[0], lengths[1] + 1, slots) - 1
    rows[:, Column.PAGES :] = np.resize(random.permutation(engine.pool.count), (slots, width))
    return rows
