"""The pictures and the rows of docs/tuning.md and docs/optimizers.md."""

import pytest

from scripts.pages import tuning
from scripts.pages.tuning import make_pictures, measured, search_rows, source


def test_optimizers_are_drawn():
    assert "optimizers.svg" in make_pictures()


def row(date: str, **fields):
    return {"date": date, "commit": f"{date[-2:]}34567890", "command": f"c{date[-2:]}", "device": "cpu", **fields}


def test_each_row_has_its_own_date_and_commit():
    rows = [row("2026-11-24"), row("2026-11-23")]
    assert measured(rows) == "2026-11-24 at 2434567, 2026-11-23 at 2334567"
    assert source(rows) == "cpu; `c23`, 2026-11-23 at 2334567; `c24`, 2026-11-24 at 2434567."


def test_a_search_that_is_repeated_replaces_the_one_before(monkeypatch):
    def runs(date: str, name: str, keys):
        return [row(date, work="small", optimizer=name, power=power, seed=seed) for power, seed in keys]

    rows = [
        *runs("2026-11-23", "adamw", [(0, 0), (1, 0), (1, 1)]),
        *runs("2026-11-23", "soap", [(0, 0)]),
        *runs("2026-11-24", "adamw", [(0, 0), (0, 1)]),
        *runs("2026-11-25", "soap", [(1, 0)]),  # a search that went on after a stop
    ]
    monkeypatch.setattr(tuning, "read_all", lambda path: rows)
    found = [(r["optimizer"], r["power"], r["seed"], r["date"][-2:]) for r in tuning.read_runs("small")]
    assert found == [("adamw", 0, 0, "24"), ("adamw", 0, 1, "24"), ("soap", 0, 0, "23"), ("soap", 1, 0, "25")]


def test_a_sampler_is_compared_with_random_search_over_all_seeds(monkeypatch):
    losses = {0: (2.0, 2.2), 1: (2.0, 2.0), 2: (2.1, 2.5)}
    studies = {
        ("run", seed): {
            "tpe": row(f"2026-11-2{seed}", sampler="tpe", loss_at_30=ours),
            "random": row("2026-11-29", sampler="random", loss_at_30=theirs),
        }
        for seed, (ours, theirs) in losses.items()
    }
    monkeypatch.setattr(tuning, "read_studies", lambda results: studies)
    (found,) = search_rows()
    assert (found["sampler"], found["seeds"], found["wins"], found["ties"]) == ("tpe", 3, 2, 1)
    assert found["gain"] == pytest.approx(0.2) and found["date"] == "2026-11-20"
    assert found["errors"] == pytest.approx(found["gain"] / found["error"])
