"""docs/profiles.md: losses of recipes with several seeds stand beside the curves of single runs."""

from scripts.pages.performance import seed_ratios

DATE = "2026-11-28T00:00:00"


def row(variant, ratio, work="a", date=DATE):
    return {"variant": variant, "eval_loss_ratio": ratio, "work": work, "date": date}


def test_ratios_of_seeds_are_those_of_the_newest_work():
    rows = [
        row("bf16, seed 0", 1.0), row("fp8 delayed, seed 1", 1.002), row("fp8 delayed, seed 0", 0.999),
        row("fp8 current, seed 0", 0.5, work="older", date="2026-11-27T00:00:00"), row("fp8 blockwise", 2.0),
    ]  # fmt: skip
    assert (
        seed_ratios(rows) == "\nHeld-out loss over bfloat16's with the same seed (`a`): fp8 delayed 0.9990, 1.0020.\n"
    )
    assert seed_ratios([row("fp8 delayed", 1.0)]) == ""
