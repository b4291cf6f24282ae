"""Makes the tables and pictures of the documentation: every page, or the named ones.

    python -m scripts.pages [FILE ...] [--list]

Each module of this package describes pages in its `PAGES`; most tables come from the rows in `benchmarks/results/`.
"""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path

from scripts.pages.page import DOCS, PICTURES, Page

DESCRIPTIONS = sorted(
    path.stem for path in Path(__file__).parent.glob("[!_]*.py") if "\nPAGES = " in path.read_text(encoding="utf-8")
)


def pages() -> Iterator[Page]:
    """Yield every page that is made."""
    for name in DESCRIPTIONS:
        yield from importlib.import_module(f"scripts.pages.{name}").PAGES


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="names of pages in docs/, without .md; all if none")
    parser.add_argument("--list", action="store_true", help="print the names of the pages")
    args = parser.parse_args()
    known = {name: [page for page in pages() if page.file == f"{name}.md"] for name in _names()}
    if unknown := sorted(set(args.files) - set(known)):
        parser.error(f"no made page is named {', '.join(unknown)}; there are {', '.join(known)}")
    for name in args.files or known:
        if args.list:
            print(name)
            continue
        for page in known[name]:
            (DOCS / page.file).write_text(page.make(page.read()), encoding="utf-8")
            for picture, drawing in page.pictures().items():
                (PICTURES / picture).write_text(drawing, encoding="utf-8")
        print(f"docs/{name}.md")


def _names() -> list[str]:
    return list(dict.fromkeys(page.file.removesuffix(".md") for page in pages()))


if __name__ == "__main__":
    main()
