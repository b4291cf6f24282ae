"""Runs a notebook's cells in order and keeps what they print in it, without Jupyter.

python scripts/run_notebook.py docs/first_hour.ipynb

Lines that begin with `!` are commands, as in Jupyter; `python` in them is this Python.
"""

import contextlib
import io
import json
import shlex
import subprocess
import sys
from code import InteractiveInterpreter
from pathlib import Path
from typing import Any


class Cells(InteractiveInterpreter):
    """Runs one cell after the other in one namespace; what they raise is raised."""

    def showtraceback(self) -> None:
        raise  # of the exception that is being handled

    def showsyntaxerror(self, filename: str | None = None, **_: Any) -> None:
        raise


def run_cell(text: str, cells: Cells) -> str:
    """Return the output of a cell.

    Raises:
      RuntimeError: a command failed.
    """
    printed = io.StringIO()
    code: list[str] = []

    def run_code() -> None:
        with contextlib.redirect_stdout(printed):
            cells.runsource("\n".join(code), "notebook", "exec")
        code.clear()

    for line in text.replace("\\\n", "").splitlines():
        if not line.startswith("!"):
            code.append(line)
            continue
        run_code()
        command = shlex.split(line[1:])
        command[0] = sys.executable if command[0] == "python" else command[0]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{line}\n{done.stdout}{done.stderr}")
        printed.write(done.stdout)
    run_code()
    return printed.getvalue()


def run_notebook(path: Path) -> dict[str, Any]:
    """The notebook at `path` with the outputs of its cells."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = Cells({"__name__": "notebook"})
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            text = run_cell("".join(cell["source"]), cells)
            lines = text.splitlines(keepends=True)
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
            cell["execution_count"] = count
    return notebook


if __name__ == "__main__":
    target = Path(sys.argv[1])
    content = json.dumps(run_notebook(target), indent=1, ensure_ascii=False) + "\n"
    target.write_text(content, encoding="utf-8")
