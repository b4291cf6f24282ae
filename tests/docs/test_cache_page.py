"""The tables of docs/compression_cache.md are those of the newest rows."""

from scripts.pages import compression_cache as cache_page


def test_a_format_that_misses_the_claim_is_said_to():
    row = {"work": "cache of keys and values", "format": "x", "bits_per_value": 8.25, "ratio": 1.94, "perplexity": 2.0}
    row |= {"change_percent": 0.1, "date": "2026-11-23", "commit": "0123456789", "device": "cpu", "command": "c"}
    row |= {"parameters": 1000, "max_tokens": 2000}
    assert "| x | 8.250 | 1.940 | 2.000 | +0.10 % | **missed** |" in cache_page.table("cache", [row])
    assert " met |" in cache_page.table("cache", [{**row, "ratio": 2.0}])
    assert "**missed**" in cache_page.table("cache", [{**row, "ratio": 3.0, "change_percent": 1.5}])
