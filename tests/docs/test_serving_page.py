"""The tables of docs/serving-speed.md are what their script makes from the stored rows."""

from scripts import serving_page


def test_page_is_what_its_script_makes():
    page = serving_page.PAGE.read_text(encoding="utf-8")
    assert page == serving_page.make_page(page), "run: python scripts/serving_page.py"
    assert "| compiled PyTorch |" in page and "llama3-1b, 1 x 512" in page
