"""`scripts.repeat`: which measurements of claims run on a machine, how they end, and what is said of their results."""

import json
import sys
from typing import Any

import pytest

from scripts import repeat
from scripts.pages.claims import Claim, Result
from scripts.repeat import Measurement, choose, compare, measurements, run


def result(command: str, device: str = "cpu", devices: int = 1, **others: Any) -> Result:
    row = {"command": command, "device": device, "devices": devices, "commit": "0" * 40, "date": "2026-11-01", **others}
    return Result(row, others.pop("shown", "2.0"), ("scripts",), others.get("reached"))


def claim(technique: str, *results: Result, **others: Any) -> Claim:
    return Claim(technique, "twice as fast", others.pop("verdict", "met"), results, **others)


CLAIMS = [
    claim("muP", result("python benchmarks/a.py", devices=8), result("python benchmarks/b.py", "NVIDIA H200", 2)),
    claim("weak scaling", result("python benchmarks/b.py", "NVIDIA H200", 2), result("git checkout 1 && python c.py")),
    claim("eDKM", result("python benchmarks/d.py", "NVIDIA H200 (compiled for)"), runs={"python benchmarks/e.py": 2}),
]


def test_each_command_is_one_measurement_of_all_its_claims():
    found = measurements(CLAIMS)
    assert [(one.command[-4:], one.gpus, one.new, one.by_hand) for one in found] == [
        ("a.py", 0, False, False),
        ("b.py", 2, False, False),
        ("c.py", 0, False, True),
        ("d.py", 0, False, False),
        ("e.py", 2, True, False),
    ]
    assert found[1].techniques == ["muP", "weak scaling"]


@pytest.mark.parametrize(
    ("words", "gpus", "options", "chosen"),
    [
        ([], 0, {}, "acd"),
        ([], 2, {}, "abcd"),
        (["MUP", "edkm"], 1, {}, "ad"),
        (["scaling"], 2, {}, "bc"),
        ([], 2, {"new": True}, "e"),
        ([], 1, {"new": True}, ""),
        ([], 2, {"stale": True}, "b"),
    ],
)
def test_measurements_are_chosen_by_claims_devices_and_age(words, gpus, options, chosen):
    known = measurements(CLAIMS)
    for one in known:
        one.stale = one.command.endswith("b.py")
    found = choose(known, words, gpus, **{"stale": False, "new": False, **options})
    assert "".join(one.command[-4] for one in found) == chosen


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(1)", "done after"),
        ("exit(3)", "failed with exit code 3"),
        ("while True: pass", "ended by its time limit"),
    ],
)
def test_commands_end_in_their_time(code, said, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(code)
    assert run(Measurement(f"python {path}", 0), 0.5 if "while" in code else 60, tmp_path).startswith(said)


def test_new_results_stand_beside_the_stored_ones():
    stored = result("python benchmarks/a.py")
    other = result("python benchmarks/x.py", shown="7.0")
    new = result("python benchmarks/a.py", shown="1.9", reached=False, date="2026-11-29")
    before = [claim("muP", stored, other), claim("eDKM", other)]
    lines = list(compare(before, [claim("muP", new, other), claim("eDKM", other)], "2026-11-28"))
    assert lines == [
        "muP: twice as fast (stored verdict: met)",
        "  stored  2.0 (cpu, 0000000)",
        "  now     1.9 (cpu), DOES NOT reach the goal",
    ]


def test_the_command_measures_and_compares(tmp_path, monkeypatch, capsys):
    """With a benchmark that appends a row to the folder of results, as all do."""
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "x.jsonl").write_text("")
    script = tmp_path / "benchmarks" / "a.py"
    script.parent.mkdir()
    script.write_text("import os; open(os.environ['BENCHMARK_RESULTS'] + '/x.jsonl', 'a').write('\"new\"\\n')")

    def gather(results):
        rows = [json.loads(line) for line in (results / "x.jsonl").read_text().splitlines()]
        date = "2999-01-01" if rows else "2026-11-01"
        return [claim("muP", result("python benchmarks/a.py", shown=f"{len(rows)} rows", date=date))]

    for name, value in {"RESULTS": stored, "ROOT": tmp_path, "gather_claims": gather, "count_gpus": lambda: 0}.items():
        monkeypatch.setattr(repeat, name, value)
    assert repeat.main(["mup", "--results", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert "--- 1 of 1: python benchmarks/a.py\n--- done" in said
    assert "now     1 rows (cpu)" in said and not (stored / "x.jsonl").read_text()
    with pytest.raises(SystemExit):
        repeat.main(["no such claim"])
    assert "this machine has 0 GPUs, and no claim has such a measurement" in capsys.readouterr().err


def test_the_stored_claims_have_measurements_that_exist(monkeypatch, capsys):
    """Each has a script of this checkout, and the list names the devices."""
    monkeypatch.setattr(sys, "argv", ["repeat"])
    assert repeat.main(["--list"]) == 0 and repeat.main(["--list", "--open"]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line.split() for line in lines if line.startswith("    python benchmarks/")]
    assert len(commands) > 60 and all((repeat.ROOT / words[1]).is_file() for words in commands)
    assert any(line.startswith("weak scaling") and "(2 GPUs" in line for line in lines)
