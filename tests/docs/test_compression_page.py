"""The tables of docs/compression.md are what their script makes from the stored rows."""

from scripts import compression_page
from scripts.result_rows import RESULTS, read_rows


def test_page_is_what_its_script_makes():
    page = compression_page.PAGE.read_text(encoding="utf-8")
    rows = read_rows(RESULTS / "compression_methods.jsonl")
    assert page == compression_page.make_page(page, rows), "run: python scripts/compression_page.py"


def test_tables_have_a_line_for_each_setting():
    row = {"work": "quickstart, 5 steps", "uncompressed_perplexity": 9.0, "sequences": 8}
    rows = [
        {**row, "variant": "2:4", "implementation": "sparsegpt", "perplexity_rise": 0.25},
        {**row, "variant": "int4", "implementation": "gptq", "perplexity_rise": 0.125},
        {"work": "GPTQ of x", "device": "d", "seconds": 61.4, "peak_memory_bytes": None, "weights": 4},
    ]
    page = "".join(f"<!-- made: {name} -->\nb\n<!-- end -->\n" for name in ("model", "time", "other"))
    made = compression_page.make_page(page, rows)
    assert "perplexity 9.00 on held-out text, calibrated on 8 sequences" in made
    assert "| 2:4 | – | – | +0.250 |" in made and "| int4 | – | – | +0.125 |" in made
    assert "| GPTQ of x | d | 61 | – |" in made and "<!-- made: other -->\n\nb\n\n<!-- end -->" in made
