"""The progress of a run on screen: a live line on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from jaxstack.observe.number_format import byte_size, duration, short_number, si_number


def progress_fields(values: Mapping[str, Any], eta_seconds: float | None = None) -> list[str]:
    """Return the texts of a progress line, such as `loss 2.3450`, most important first; unknown values are left out.

    Args:
      values: the values of a `metrics.jsonl` line.
      eta_seconds: remaining time.
    """

    def number(key: str) -> float | None:
        value = values.get(key)
        return float(value) if isinstance(value, int | float) else None

    parts = []
    if (loss := number("loss")) is not None:
        mean = number("mean_loss")
        parts.append(f"loss {loss:.4f}" + (f" (mean {mean:.4f})" if mean is not None and mean != loss else ""))
    # What is learned from answers: the loss alone says little of it.
    parts += [f"{key} {value:.4f}" for key in ("reward", "accuracy") if (value := number(key)) is not None]
    if (rate := number("tokens_per_second")) is not None:
        parts.append(f"{short_number(rate)} tok/s")
    if (flops := number("model_tflops_per_device")) is not None:
        parts.append(f"{short_number(flops)} TFLOP/s")
    if (mfu := number("mfu")) is not None:
        parts.append(f"MFU {100 * mfu:.1f}%")
    if (memory := number("peak_memory_bytes")) is not None:
        parts.append(f"mem {byte_size(memory)}")
    if eta_seconds is not None:
        parts.append(f"ETA {duration(eta_seconds)}")
    if (joules := number("joules_per_token")) is not None:
        parts.append(f"{si_number(joules)}J/tok")
    if (cost := number("cost")) is not None:
        parts.append(f"cost {cost:,.2f}")
    return parts


class Progress:
    """Shows a run's step, loss, tokens/s, TFLOP/s, MFU, memory and ETA on screen. A context manager.

    On a terminal it is one live line with a bar, above which messages scroll. Elsewhere (a file, a pipe, TERM=dumb) it
    is a plain line for each update, `step 100/2000 | loss 2.3450 | 12.3k tok/s | ... | ETA 3m20s`, without control
    codes. It takes plain numbers and never touches a device.

    Args:
      total_steps: number of steps of the whole run, including those before a resume.
      start_step: number of completed steps that the run resumes from.
      enabled: False: print nothing.
      stream: where to print; standard output by default.
    """

    def __init__(self, total_steps: int, start_step: int = 0, enabled: bool = True, stream: TextIO | None = None):
        self._total = total_steps
        self._stream = stream or sys.stdout
        self._enabled = enabled
        terminal = self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
        self._live = _LiveLine(total_steps, start_step, self._stream) if enabled and terminal else None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def update(self, step: int, values: Mapping[str, Any], eta_seconds: float | None = None) -> None:
        """Show that `step` steps are done, with the values of its `metrics.jsonl` line."""
        fields = progress_fields(values, eta_seconds)
        if self._live:
            self._live.update(step, fields)
        elif self._enabled:
            self._print(" | ".join([f"step {step}/{self._total}", *fields]))

    def say(self, text: str) -> None:
        """Print a message, above the live line if there is one."""
        if self._live:
            self._live.say(text)
        elif self._enabled:
            self._print(text)

    def close(self) -> None:
        """End the live line, which stays visible. Later messages are plain lines."""
        if self._live:
            self._live.close()
            self._live = None

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class _LiveLine:
    """A progress bar followed by values, redrawn in place. On a narrow terminal the last ones but ETA are left out."""

    def __init__(self, total: int, start: int, stream: TextIO):
        # Imported here: a run whose output goes to a file never needs it.
        from rich.console import Console
        from rich.live import Live

        self._total = total
        self._step = start
        self._fields = list[str]()
        self._began = time.monotonic()
        self._console = Console(file=stream, highlight=False)
        self._live = Live(
            get_renderable=self._render, console=self._console, refresh_per_second=4, vertical_overflow="crop"
        )
        self._live.start()

    def update(self, step: int, fields: list[str]) -> None:
        self._step = step
        self._fields = fields
        self._live.refresh()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        counter = f"step {self._step}/{self._total}"
        fields = list(self._fields) or [f"starting, {duration(time.monotonic() - self._began)}"]
        room = self._console.width - len(counter) - 2
        while fields and sum(len(field) + 3 for field in fields) > room:
            others = [index for index, field in enumerate(fields) if not field.startswith("ETA")]
            fields.pop(others[-1] if len(fields) > 2 else -1)
        bar_width = min(30, room - sum(len(field) + 3 for field in fields))
        row = Table.grid(padding=(0, 1))
        cells: list[Any] = [Text(counter, "bold")]
        if bar_width >= 5:
            cells.append(ProgressBar(total=max(self._total, 1), completed=self._step, width=bar_width))
        text = Text(no_wrap=True, overflow="ellipsis")
        for index, field in enumerate(fields):
            text.append(" | " if index else "", "dim")
            text.append(field)
        row.add_row(*cells, text)
        return row
