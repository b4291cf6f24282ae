"""The tables of docs/local-sgd.md are what their script makes from the stored rows."""

from scripts import islands_page
from scripts.result_rows import RESULTS, read_all


def test_page_is_what_its_script_makes():
    page = islands_page.PAGE.read_text(encoding="utf-8")
    rows = [read_all(RESULTS / f"{name}.jsonl") for name in ("islands", "slow_link")]
    assert page == islands_page.make_page(page, *rows), "run: python scripts/islands_page.py"
    assert "| data parallelism |" in page
    assert all(f"<!-- made: {name} -->" in page for name in ("bytes", "quickstart"))
