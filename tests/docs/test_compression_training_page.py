"""The tables of docs/compression_training.md are made from the rows of its benchmark."""

from scripts.pages import compression_training as script


def test_a_table_has_the_rows_of_the_newest_run():
    common = {"part": "qat", "variant": "int3", "date": "2026-01-02", "commit": "abcdef012", "device": "cpu"}
    values = {"work": "quickstart, 9 + 3 steps", "losses": [1.0, 2.0], "loss": 1.5, "rise": 0.25}
    row = {**common, **values, "implementation": "qat", "run": "b"}
    old = {**row, "implementation": "rtn", "run": "a"}
    made = script.table("qat", [old, row])
    assert f"| int3 | {script.NAMES['qat']} | 1.5000 | +0.2500 |" in made and "rounding |" not in made
    assert "Quickstart, 9 + 3 steps; mean of 2 repetitions, 2026-01-02, commit abcdef0, cpu." in made
    assert "Not measured yet" in script.table("distill", [row])


def test_losses_of_another_start_are_not_beside_those_of_the_newest_run():
    common = {"part": "low_rank", "variant": "low rank", "work": "w", "losses": [1.0], "kept": 0.5, "device": "cpu"}
    common |= {"commit": "abcdef012", "implementation": "maestro"}
    new = {**common, "run": "c", "date": "2026-01-03", "penalty": 0.1, "loss": 1.5, "rise": 0.5}
    same = {**new, "run": "b", "date": "2026-01-02", "penalty": 0.2, "loss": 1.25, "rise": 0.25}
    other = {**new, "run": "a", "date": "2026-01-01", "penalty": 0.3, "loss": 3.0, "rise": 0.25}
    made = script.table("low_rank", [other, same, new])
    assert "penalty 0.1" in made and "penalty 0.2" in made and "penalty 0.3" not in made
