"""The drawing of the packages in docs/architecture.md."""

import re

from scripts.architecture_picture import LETTER, draw_layers, fit_row, read_rows


def test_every_box_has_room_for_its_name():
    """A box shows a module, or the package that several modules of a row share, and overlaps no other one."""
    drawn = draw_layers()
    boxes = re.findall(r'<rect x="[\d.]+" y="\d+" width="([-\d.]+)"[^\n]*\n<text[^>]*font-size="12">([\w.]+)<', drawn)
    assert len(boxes) > 40
    assert [name for width, name in boxes if float(width) < LETTER * len(name)] == []
    names = {name for _, name in boxes}
    for modules in read_rows().values():
        assert all(module in names or module.partition(".")[0] in names for module in modules)


def test_a_row_that_has_room_names_its_modules():
    assert fit_row(["a", "b.c", "b.d"], 500) == ["a", "b.c", "b.d"]
    assert fit_row(["a", "b.c", "d.e", "b.d"], 60) == ["a", "b", "d.e"]
