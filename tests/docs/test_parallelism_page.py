"""The tables of docs/parallelism.md are what their script makes from the stored rows."""

from scripts.pages import parallelism as parallelism_page


def test_goals_say_how_much_is_missing():
    place = {"device": "NVIDIA H200", "devices": 2}
    overlap = [{"work": "m tensor2", "hidden": 0.75, "overlap": 0.9, **place}]
    dated = {"variant": "data", "date": "2026-01-01", **place}
    steps = [
        {"work": "m tokens a device", "efficiency": 0.98, **dated},
        {"work": "m tokens a device", "efficiency": 0.94, **dated, "devices": 4},
        {"work": "m tokens in all", "efficiency": 0.5, **dated},
    ]
    text = parallelism_page.goals(overlap, steps)
    assert "| 80 % | 75.0 % | no, 5.0 points short |" in text and "| 97 % | 98.0 % | yes |" in text
    assert "| 80 % | 90.0 % | yes |" in text and "| 95 % | 94.0 % | no, 1.0 points short |" in text
    assert "in all" not in text, "strong scaling has no goal"


def test_steps_are_compared_with_the_baseline_of_their_own_run():
    work = {"work": "m tokens a device", "device": "NVIDIA H200", "milliseconds": 10, "command": "c"}
    rate = parallelism_page.RATE

    def run(name: str, date: str, alone: float, layouts: dict[str, float]) -> list[dict]:
        common = {**work, "run": name, "date": date}
        rows = [{**common, "variant": "1 device", "devices": 1, rate: alone}]
        return rows + [{**common, "variant": layout, "devices": 2, rate: speed} for layout, speed in layouts.items()]

    first = run("a", "2026-01-01", 100.0, {"data": 90.0, "fsdp": 80.0})
    table = parallelism_page.step_table(first + run("b", "2026-01-02", 200.0, {"fsdp": 190.0}))
    relative = [line.split("|")[6].strip() for line in table.splitlines()[2:]]
    assert relative == ["1.000", "0.900", "1.000", "0.950"], "data of the first run, fsdp of the second"


def test_time_that_is_not_hidden_is_split_into_its_two_causes():
    common = {"work": "m tensor2", "device": "NVIDIA H200", "devices": 2, "date": "2026-01-01", "commit": "a" * 40}
    before = {"variant": "no overlap", "milliseconds": 31, "busy": 30, "computation": 20, "communication": 10,
              "overlapped": 0, "overlap": 0.0}  # fmt: skip
    after = {"variant": "overlap", "milliseconds": 25, "busy": 24, "computation": 23, "communication": 2,
             "overlapped": 1, "overlap": 0.5, "hidden": 0.6}  # fmt: skip
    text = parallelism_page.overlap_table([{**common, **before}, {**common, **after}])
    assert "4.0 ms still add" in text and "3.0 ms because" in text and "1.0 ms of collectives" in text
