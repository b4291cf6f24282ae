"""The page of other fields is what its script makes from the stored rows, and every example has a row's shape."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.training.fields import FOLDER, KEYS, NAMES, check_result
from scripts.pages import fields as fields_page
from scripts.pages.page import fill
from scripts.pages.rows import ROOT

RESULT = {
    "claim": "A claim.", "paper": "arXiv:2201.00001", "measure": "error", "ours": 1.5, "baseline": 3.0,
    "published": None, "checks": {"error <= 2": True, "4x below the baseline": False}, "numbers": {"epochs": 3.0},
    "picture": [{"title": "Error", "x_label": "steps", "curves": {"ours": [(0, 3.0), (5, 1.5)]}}],
}  # fmt: skip
ROW = {
    **RESULT, "work": "some_example", "implementation": "jaxstack", "device": "cpu", "seconds": 60.0,
    "date": "2026-01-01T00:00", "commit": "0123456789", "command": "python benchmarks/training/fields.py some_example",
}  # fmt: skip


def test_page_shows_misses():
    page = "<!-- made: table -->\n<!-- end -->\n<!-- made: details -->\n<!-- end -->"
    made = fill(page, {"table": lambda: fields_page.table([ROW]), "details": lambda: fields_page.details([ROW])})
    assert "[Some example](examples/fields/some_example.py): A claim. ([arXiv:2201.00001](" in made
    assert "| error | 1.5 | 3 | – | **missed**: 4x below the baseline |" in made
    assert "- met: error <= 2\n- **missed**: 4x below the baseline\n- epochs: 3\n" in made


@pytest.mark.parametrize("change", [{"ours": "1"}, {"more": 1}, {"checks": {}}, {"picture": [{"title": "t"}]}])
def test_results_of_another_shape_are_refused(change):
    check_result(RESULT)
    with pytest.raises(TypeError):
        check_result({**RESULT, **change})


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_short_and_have_a_test(name):
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 250
    assert "Trainer(" in source and f"python docs/examples/fields/{name}.py" in source
    assert set(KEYS) <= {key for key in KEYS if f'"{key}"' in source}, "main returns every key"
    assert (Path(__file__).parent / f"test_{name}.py").is_file()


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_criteria_that_the_page_calls_met_are_met_again(name, tmp_path):
    ours = ("JAX_", "XLA_")  # the tests' own settings: eight devices, and programs that are not optimised
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    environment |= {"BENCHMARK_RESULTS": str(tmp_path), "BENCHMARK_UNCOMMITTED": "1"}
    command = [sys.executable, "benchmarks/training/fields.py", name]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=580)
    found = json.loads((tmp_path / "fields.jsonl").read_text(encoding="utf-8"))
    (row,) = [row for row in fields_page.newest_rows() if row["work"] == name]
    checks = row["checks"]
    simulator = shutil.which("iverilog")
    checked = [name for name in checks if simulator or "simulated by iverilog" not in name]  # needs the program
    assert not [name for name in checked if checks[name] and not found["checks"][name]], found["numbers"]
