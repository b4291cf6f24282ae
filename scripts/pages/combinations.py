"""The tables of docs/combinations.md, from the features that the configuration declares."""

from collections.abc import Iterator, Mapping, Sequence

from jaxstack.config.features import Feature, are_alternatives, find_exclusion, find_remark
from jaxstack.run_config import FEATURES
from scripts.pages import page
from scripts.pages.page import Page

FAMILIES = {
    "layouts": ("parallel", "local_sgd"),
    "training and model": ("train", "observe", "model"),
    "weights and precision": ("adapters", "compression", "distill", "preference", "policy", "precision"),
    "optimizers": ("optimizer",),
}
"""Family of features -> sections of the configuration. A table has a family's features as columns."""


def shown() -> list[Feature]:
    """Return the features of the page, family by family, without those that only have kinds."""
    kinds = {name for feature in FEATURES for name in feature.also}
    return [f for sections in FAMILIES.values() for f in FEATURES if f.section in sections and f.name not in kinds]


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Yield every pair of different features once, the earlier one of the page first."""
    features = shown()
    for index, one in enumerate(features):
        for other in features[index + 1 :]:
            yield one, other


def notes() -> dict[str, list[str]]:
    """Return the notes of the tables: text -> pairs that it holds for, in the order of the page."""
    found: dict[str, list[str]] = {}
    for one, other in pairs():
        if text := note(one, other):
            found.setdefault(text, []).append(f"{one.name} + {other.name}")
    return found


def note(one: Feature, other: Feature) -> str | None:
    """Return why two features exclude each other, or within which limits they work together; None if they just work."""
    if excluded := find_exclusion(FEATURES, one, other):
        return f"refused: {excluded.reason}"
    remark = find_remark(one, other)
    return remark and f"{'slower' if remark.slower else 'works'}: {remark.text}"


def cell(one: Feature, other: Feature, numbers: Mapping[str, int]) -> str:
    """Return the cell of two features: `yes`, or `no`, `slow` or `yes` with the number of its note."""
    text = note(one, other)
    if text is not None:
        word = {"refused": "**no**", "slower": "slow", "works": "yes"}[text.partition(":")[0]]
        return f"{word} {numbers[text]}"
    return "·" if one is other or are_alternatives(one, other) else "yes"


def table(columns: Sequence[Feature], rows: Sequence[Feature], numbers: Mapping[str, int]) -> str:
    """Return a table in Markdown: a row for each feature of `rows`, a column for each of `columns`."""
    lines = []
    for row in rows:
        known = [column for column in columns if row not in columns or columns.index(column) < columns.index(row)]
        cells = [cell(column, row, numbers) if column in known else "" for column in columns]
        lines.append([row.name, *cells])
    return page.spaced_table(["", *(feature.name for feature in columns)], lines)


def make_tables() -> str:
    """Return the tables: each family's features against those of the same and of later families."""
    numbers = {text: number for number, text in enumerate(notes(), 1)}
    features = shown()
    parts = []
    for family, sections in FAMILIES.items():
        columns = [feature for feature in features if feature.section in sections]
        rows = features[features.index(columns[0]) :]
        if len(rows) > len(columns):
            parts.append(f"### With {family}\n\n{table(columns, rows, numbers)}")
    return "\n\n".join(parts)


def make_notes() -> str:
    """Return the notes of the tables as a numbered list."""
    return "\n".join(
        f"{number}. {text[0].upper()}{text[1:]} ({'; '.join(where)})."
        for number, (text, where) in enumerate(notes().items(), 1)
    )


def make_switches() -> str:
    """Return a table of how each feature is turned on."""
    rows = [[feature.name, "<br>".join(f"`{text}`" for text in feature.turn_on)] for feature in shown()]
    return page.table(["feature", "turned on by, for example"], rows)


PAGES = (Page("combinations.md", {"tables": make_tables, "notes": make_notes, "switches": make_switches}),)
