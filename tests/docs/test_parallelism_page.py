"""The tables of docs/parallelism.md are what their script makes from the stored rows."""

from scripts import parallelism_page
from scripts.result_rows import RESULTS, read_rows


def test_page_is_what_its_script_makes():
    page = parallelism_page.PAGE.read_text(encoding="utf-8")
    rows = [read_rows(RESULTS / f"{name}.jsonl") for name in ("overlap", "parallel")]
    assert page == parallelism_page.make_page(page, *rows), "run: python scripts/parallelism_page.py"
    assert all(f"<!-- made: {name} -->" in page for name in ("goals", "overlap", "steps", "clocks"))


def test_goals_say_how_much_is_missing():
    place = {"device": "NVIDIA H200", "devices": 2}
    overlap = [{"work": "m tensor2", "hidden": 0.75, **place}]
    steps = [
        {"work": "m tokens a device", "variant": "data", "efficiency": 0.98, **place},
        {"work": "m tokens in all", "variant": "data", "efficiency": 0.5, **place},
    ]
    text = parallelism_page.goals(overlap, steps)
    assert "| 80 % | 75.0 % | no, 5.0 points short |" in text and "| 97 % | 98.0 % | yes |" in text
    assert "in all" not in text, "strong scaling has no goal"


def test_time_that_is_not_hidden_is_split_into_its_two_causes():
    common = {"work": "m tensor2", "device": "NVIDIA H200", "devices": 2, "date": "2026-01-01", "commit": "a" * 40}
    before = {"variant": "no overlap", "milliseconds": 31, "busy": 30, "computation": 20, "communication": 10,
              "overlapped": 0, "overlap": 0.0}  # fmt: skip
    after = {"variant": "overlap", "milliseconds": 25, "busy": 24, "computation": 23, "communication": 2,
             "overlapped": 1, "overlap": 0.5, "hidden": 0.6}  # fmt: skip
    text = parallelism_page.overlap_table([{**common, **before}, {**common, **after}])
    assert "4.0 ms still add" in text and "3.0 ms because" in text and "1.0 ms of collectives" in text
