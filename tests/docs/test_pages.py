"""Every made page of the documentation, with its pictures, is what its description makes from the stored rows."""

import pytest

from scripts.pages.__main__ import pages
from scripts.pages.page import PICTURES

SEARCHES = ("plan.md",)
"""Pages that take searches of the planner."""
PAGES = [
    pytest.param(page, id=f"{page.file} {index}", marks=[pytest.mark.exhaustive] if page.file in SEARCHES else [])
    for index, page in enumerate(pages())
]


@pytest.mark.parametrize("page", PAGES)
def test_page_is_what_its_description_makes(page):
    text = page.read()
    assert text == page.make(text), f"run: python -m scripts.pages {page.file.removesuffix('.md')}"
    assert all(f"<!-- made: {part} -->" in text for part in page.parts), "every part has its place"


@pytest.mark.parametrize("page", [param for param in PAGES if param.values[0].pictures is not dict])
def test_pictures_are_what_their_description_makes(page):
    drawn = page.pictures()
    assert drawn
    for name, drawing in drawn.items():
        stored = (PICTURES / name).read_text(encoding="utf-8")
        assert stored == drawing, f"run: python -m scripts.pages {page.file.removesuffix('.md')}"
