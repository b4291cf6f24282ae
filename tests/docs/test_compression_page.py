"""The tables of docs/compression.md have a line for each setting."""

import functools

from scripts.pages import compression
from scripts.pages.page import fill


def test_tables_have_a_line_for_each_setting():
    row = {"work": "quickstart, 5 steps", "uncompressed_perplexity": 9.0, "sequences": 8}
    rows = [
        {**row, "variant": "2:4", "implementation": "sparsegpt", "perplexity_rise": 0.25},
        {**row, "variant": "int4", "implementation": "gptq", "perplexity_rise": 0.125},
        {"work": "GPTQ of x", "device": "d", "seconds": 61.4, "peak_memory_bytes": None, "weights": 4},
    ]
    page = "".join(f"<!-- made: {name} -->\nb\n<!-- end -->\n" for name in ("model", "time", "other"))
    parts = {"model": compression.model_tables, "time": compression.time_table}
    made = fill(page, {name: functools.partial(make, rows) for name, make in parts.items()})
    assert "perplexity 9.00 on held-out text, calibrated on 8 sequences" in made
    assert "| 2:4 | – | – | +0.250 |" in made and "| int4 | – | – | +0.125 |" in made
    assert "| GPTQ of x | d | 61 | – |" in made and "<!-- made: other -->\n\nb\n\n<!-- end -->" in made
