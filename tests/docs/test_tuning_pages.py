"""The pictures of docs/tuning.md and docs/optimizers.md."""

from scripts.pages.tuning import make_pictures


def test_optimizers_are_drawn():
    assert "optimizers.svg" in make_pictures()
