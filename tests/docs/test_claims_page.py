"""docs/claims.md: verdicts need evidence that agrees with them, and results of code that has changed bear a mark."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from scripts.pages import claims
from scripts.pages.claims import MARK, Claim, ClaimError, Result
from scripts.pages.rows import RESULTS

ROW = {"commit": "0" * 40, "date": "2026-11-28T00:00:00", "command": "python x.py", "speedup": 2.0, "device": "cpu"}


def make_claim(verdict: str, **fields: Any) -> Claim:
    return Claim("a technique", "twice as fast", verdict, **fields)


def result(reached: bool | None, **row: Any) -> Result:
    return Result({**ROW, **row}, "2.0 times", ("scripts",), reached)


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (make_claim("met"), "'met' needs a row or a test; without any it is 'not shown'"),
        (make_claim("missed"), "'missed' needs a row or a test"),
        (make_claim("in part", tests=["tests/docs/test_claims_page.py"]), "needs `missing`"),
        (make_claim("not shown"), "needs `missing`"),
        (make_claim("proven"), "the verdict is 'proven', not one of met, missed"),
        (make_claim("met", results=[result(True), result(False)]), "the newest rows say otherwise"),
        (make_claim("missed", results=[result(True)]), "the newest rows say otherwise"),
        (make_claim("met", tests=["tests/docs/test_no_such.py"]), "there is no tests/docs/test_no_such.py"),
    ],
)
def test_a_verdict_without_its_evidence_is_one_message(claim, said):
    with pytest.raises(ClaimError, match=said):
        claim.check()


@pytest.mark.parametrize(
    "claim",
    [
        make_claim("met", results=[result(True), result(None)]),
        make_claim("missed", results=[result(False)]),
        make_claim("in part", results=[result(None)], missing="the rest"),
        make_claim("not shown", missing="a row"),
    ],
)
def test_a_verdict_with_its_evidence_is_taken(claim):
    claim.check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"file": "no_such_file"}, "no row of no_such_file that can be repeated"),
        ({"where": {"work": "no such work"}}, "no row of device that can be repeated has"),
        ({"code": ["no/such/path"]}, "there is no no/such/path, which a row of device measures"),
        ({"show": "{no_such_value}"}, "has no 'no_such_value'"),
    ],
)
def test_a_description_that_no_row_fits_is_one_message(change, said):
    described = {"file": "device", "where": {"work": "copy of 2 GiB"}, "show": "{milliseconds}", "code": ["scripts"]}
    assert claims._results("x", described, RESULTS)
    with pytest.raises(ClaimError, match=said):
        claims._results("x", {**described, **change}, RESULTS)


@pytest.mark.parametrize(
    ("speedup", "goals", "reached"),
    [
        (2.0, {}, None),
        (2.0, {"at_least": {"speedup": 2}}, True),
        (2.0, {"at_least": {"speedup": 1}, "at_most": {"speedup": 1.5}}, False),
        (None, {"at_most": {"speedup": 1}}, False),
    ],
)
def test_goals_of_values(speedup, goals, reached):
    """A value that was not found, such as the step of a loss that no run reaches, reaches no goal."""
    assert claims._reached({**ROW, "speedup": speedup}, goals) is reached


def test_a_goal_beside_another_row_is_times_its_value():
    goals = {"at_least": {"speedup": 1.5}}
    assert claims._reached({**ROW, "speedup": 3.0}, goals, {**ROW, "speedup": 2.0}) is True
    assert claims._reached({**ROW, "speedup": 2.9}, goals, {**ROW, "speedup": 2.0}) is False


def test_rows_of_two_commits_are_not_compared(tmp_path):
    """Of each device and variant the newest counts."""
    described = [{"file": "x", "where": {"variant": name}, "show": "", "code": ["scripts"]} for name in "ab"]
    described[0] |= {"at_least": {"speedup": 1.0}, "beside": 1}

    def measure(commits: Sequence[str]) -> None:
        rows = [{**ROW, "variant": name, "commit": commit * 40} for name, commit in zip("ab", commits, strict=True)]
        (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))

    measure("11")
    (found,) = claims._results("x", described[0], tmp_path, described)
    assert found.reached
    measure("12")
    with pytest.raises(ClaimError, match="measure both again in one run"):
        claims._results("x", described[0], tmp_path, described)


def test_a_result_of_unknown_code_bears_a_mark():
    assert claims.mark(result(None)) == f" {MARK}"  # its commit is unknown
    assert f"2.0 times {MARK}" in claims.claims_table([make_claim("met", results=[result(None)])])


def test_each_result_leads_to_the_table_that_shows_its_row():
    """Of a benchmark with a page of its own, that is where."""
    for file, address in (("fp8", "performance-rows.md#fp8"), ("web", "export.md#in-a-browser")):
        shown = Result({**ROW, "commit": "0123456789"}, "2.0 times", ("scripts",), None, file)
        assert f"[0123456]({address})" in claims.claims_table([make_claim("met", results=[shown])])


def test_a_main_workload_is_shown_with_the_most_gpus_that_have_a_peer(monkeypatch):
    common = {"date": "2026-11-28", "command": "python x.py", "commit": "0" * 40, "device": "x", "run": "one"}

    def rows_of(devices: int, **speeds: float) -> list[dict[str, Any]]:
        found = {"work": f"llama3-8b fsdp{devices} bf16", "devices": devices, **common}
        return [{**found, "implementation": i, claims.performance.RATE: speed} for i, speed in speeds.items()]

    rows = [*rows_of(2, jaxstack=120.0, torchtitan=100.0), *rows_of(4, jaxstack=90.0)]
    monkeypatch.setattr(claims, "read_all", lambda path: rows)
    titles = {claim.technique: claim for claim in claims._workloads(RESULTS)}
    assert len(titles) == len(set(claims.performance.WORKS.values()))
    shown = titles["Llama 8B, bfloat16, FSDP"]
    assert (shown.verdict, shown.results[0].shown) == ("met", "1.20 on 2 GPUs")
    rows += rows_of(4, torchtitan=100.0)
    again = next(claim for claim in claims._workloads(RESULTS) if claim.technique == shown.technique)
    assert (again.verdict, again.results[0].shown) == ("missed", "0.90 on 4 GPUs")
