"""Renders nested plain data as HTML tables. Everything that comes from outside is escaped."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from jaxstack.observe.number_format import byte_size, short_number

_MAX_ROWS = 200


def render_value(value: object, key: str = "") -> str:
    """Render a JSON-like value as HTML: mappings and lists of mappings become tables, other values text.

    Args:
      value: plain data.
      key: its name; numbers under a key that ends in `_bytes` are shown as sizes.
    """
    if isinstance(value, Mapping):
        return key_value_table(value) if value else "–"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if value and all(isinstance(row, Mapping) for row in value):
            return row_table(value)
        parts = [render_value(item, key) for item in value[:_MAX_ROWS]]
        return ("<br>" if sum(map(len, parts)) > 60 else ", ").join(parts) or "–"
    return html.escape(_text(value, key))


def key_value_table(values: Mapping[str, Any]) -> str:
    """Render a mapping as an HTML table with one row per key."""
    rows = (f"<tr><th>{_label(key)}</th><td>{render_value(value, str(key))}</td></tr>" for key, value in values.items())
    return f'<div class="scroll"><table class="keys">{"".join(rows)}</table></div>'


def row_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render a list of mappings as an HTML table with one column per key; very long tables are cut.

    On a phone each row of the table is its own block.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    sides = {key: _side(rows, key) for key in keys}
    head = "".join(f"<th{sides[key]}>{_label(key)}</th>" for key in keys)
    body = ""
    for row in rows[:_MAX_ROWS]:
        body += f"<tr>{''.join(_cell(key, row.get(key), sides[key]) for key in keys)}</tr>"
    more = f"<p>and {len(rows) - _MAX_ROWS} more</p>" if len(rows) > _MAX_ROWS else ""
    table = f"<table class='rows'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>{more}'


def _cell(key: object, value: object, side: str) -> str:
    return f'<td{side} data-label="{_label(key)}"><div>{render_value(value, str(key))}</div></td>'


def _side(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    cells = [row.get(key) for row in rows]
    numbers = all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells)
    return ' class="number"' if numbers else ""


def _label(key: object) -> str:
    return html.escape(str(key).removesuffix("_bytes").replace("_", " "))


def _text(value: object, key: str) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and key.endswith("_bytes"):
        return byte_size(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    if isinstance(value, float):
        return short_number(value, 4)
    return str(value)
