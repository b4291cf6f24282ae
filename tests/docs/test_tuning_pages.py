"""Tables and pictures of docs/tuning.md and docs/optimizers.md are what their script makes from the stored rows."""

from scripts import tuning_pages


def test_pages_are_what_their_script_makes():
    for path in tuning_pages.PAGES:
        page = path.read_text(encoding="utf-8")
        assert page == tuning_pages.make_page(page), "run: python scripts/tuning_pages.py"


def test_pictures_are_what_their_script_makes():
    drawn = tuning_pages.make_pictures()
    assert "optimizers.svg" in drawn
    for name, drawing in drawn.items():
        stored = (tuning_pages.PICTURES / name).read_text(encoding="utf-8")
        assert stored == drawing, "run: python scripts/tuning_pages.py"
