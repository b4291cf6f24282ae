"""Replaces the parts of a documentation page that scripts make."""

import re
from collections.abc import Callable, Mapping


def fill_page(page: str, makers: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with its made parts replaced, each between `<!-- made: NAME -->` and `<!-- end -->`.

    Args:
      page: text of the page.
      makers: name of a part -> function that returns its text; parts without one are left as they are.
    """

    def replaced(found: re.Match[str]) -> str:
        text = makers[found[1]]() if found[1] in makers else found[2].strip()
        return f"<!-- made: {found[1]} -->\n\n{text}\n\n<!-- end -->"

    return re.sub(r"<!-- made: ([\w ]+) -->\n(.*?)<!-- end -->", replaced, page, flags=re.S)
