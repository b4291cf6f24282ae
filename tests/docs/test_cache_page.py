"""The tables of docs/compression_cache.md are those of the newest rows."""

from scripts.pages import compression_cache as cache_page


def test_a_format_that_misses_the_claim_is_said_to():
    row = {"work": "cache of keys and values", "format": "x", "bits_per_value": 8.25, "ratio": 1.94, "perplexity": 2.0}
    row |= {"change_percent": 0.1, "date": "2026-11-23", "commit": "0123456789", "device": "cpu", "command": "c"}
    row |= {"parameters": 1000, "max_tokens": 2000}
    assert "| x | 8.250 | 1.940 | 2.000 | +0.10 % | **missed** |" in cache_page.table("cache", [row])
    assert " met |" in cache_page.table("cache", [{**row, "ratio": 2.0}])
    assert "**missed**" in cache_page.table("cache", [{**row, "ratio": 3.0, "change_percent": 1.5}])


def test_each_model_is_shown_as_it_was_measured_last(monkeypatch):
    def rows(run: str, model: str, accuracy: float, parameters: int):
        exact = {"run": run, "model": model, "format": "none (float32)", "accuracy": 0.5, "parameters": parameters}
        return [exact, {**exact, "format": "bct", "accuracy": accuracy}, {**exact, "format": "int8", "accuracy": None}]

    stored = [*rows("1", "large", 0.1, 20), *rows("2", "small", 0.4, 10), *rows("3", "large", 0.45, 20)]
    cache = [{key: value for key, value in row.items() if value is not None} for row in [{"format": "x"}, *stored]]
    monkeypatch.setattr(cache_page, "read_all", lambda path: cache)
    found = [(row["run"], row["format"], row.get("accuracy_points")) for row in cache_page.read_formats()]
    assert [(run, name) for run, name, _ in found] == [
        *(("2", name) for name in ("none (float32)", "bct", "int8")),
        *(("3", name) for name in ("none (float32)", "bct", "int8")),
    ]
    assert [points and round(points) for *_, points in found] == [0, -10, None, 0, -5, None]


def test_losses_of_bct_are_told_in_each_measure():
    row = {
        "work": "weights",
        "model": "m",
        "parameters": 1000,
        "format": "bct; activations and softmax in 8-bit integers",
    }
    row |= {"accuracy_points": -0.5, "accuracy_percent": -2.0, "change_percent": 0.3}
    swept = {**row, "format": "bct, by the sweep of GPTQ", "accuracy_points": 0.1}
    said = cache_page.bct_losses([row, swept])
    assert (
        "met in percentage points" in said and "**missed** in percent of that" in said and "met in perplexity" in said
    )
    assert "1,000 parameters -0.50 points (-2.0 %), perplexity +0.3 %; calibrated +0.10 points" in said
    assert "**missed** in perplexity" in cache_page.bct_losses([{**row, "change_percent": 1.0}, swept])
