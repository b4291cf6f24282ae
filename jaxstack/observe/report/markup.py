"""HTML that every report shares: the style sheet, the script of the charts, and tables of nested plain data.

The script shows the values of a chart under the mouse pointer. Everything that comes from outside is escaped.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from jaxstack.observe.number_format import byte_size, short_number

CSS = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #171a1f; --soft: #5c6470; --rule:
  #e3e6ea;
  --grid: #e9ebef; --first: #2463d6; --second: #d1500b; --code: #f3f4f7; }
@media (prefers-color-scheme: dark) { :root { --page: #121417; --card: #1b1e23; --ink: #e8eaed; --soft:
  #9aa3af;
  --rule: #2c3138; --grid: #2a2f36; --first: #6ea3ff; --second: #ff9557; --code: #15181c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 36px 0 12px; }
h3 { font-size: 14px; margin: 0 0 8px; }
.lead, footer { color: var(--soft); }
.lead { margin: 0; }
.ended { margin: 0.6em 0; padding: 0.5em 0.8em; border-left: 4px solid #c0392b; background: rgba(192, 57, 43, 0.1); }
footer { margin-top: 36px; padding-top: 14px; border-top: 1px solid var(--rule); font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 10px; margin: 22px
  0 0; }
.tile, .chart, .card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile { padding: 10px 14px 11px; }
.tile span { display: block; font-size: 12.5px; color: var(--soft); }
.tile b { display: block; font-size: 21px; line-height: 1.35; font-weight: 600; font-variant-numeric:
  tabular-nums; }
.tile small { display: block; font-size: 12px; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(330px, 100%), 1fr)); gap: 12px; }
.chart { margin: 0; padding: 12px 16px 10px 12px; min-width: 0; }
.chart.wide { grid-column: 1 / -1; }
figcaption { display: flex; flex-wrap: wrap; gap: 0 16px; justify-content: space-between; font-size: 14px; }
figcaption small { font-weight: 400; color: var(--soft); margin-left: 4px; }
.legend { display: flex; flex-wrap: wrap; gap: 0 14px; font-size: 12.5px; color: var(--soft); }
.key::before { content: ""; display: inline-block; width: 16px; height: 0; margin: 0 6px 4px 0;
  border-top: 2.5px solid var(--first); }
.key.second::before { border-color: var(--second); }
.key.faint::before { opacity: .35; }
.key.dashed::before { border-top: 2px dashed var(--soft); }
output { display: block; min-height: 20px; font-size: 12.5px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.frame { display: grid; grid-template-columns: 46px 1fr; grid-template-rows: 180px 20px; margin-top: 6px; }
.wide .frame { grid-template-rows: 300px 20px; }
.plot, .x, .y { position: relative; }
.plot { border-bottom: 1px solid var(--soft); touch-action: pan-y; cursor: crosshair; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.x { grid-column: 2; }
.x span, .y span { position: absolute; font-size: 11.5px; line-height: 1; color: var(--soft); white-space:
  nowrap;
  font-variant-numeric: tabular-nums; }
.x span { top: 6px; transform: translateX(-50%); }
.y span { right: 8px; transform: translateY(50%); }
.grid { stroke: var(--grid); stroke-width: 1; vector-effect: non-scaling-stroke; }
.line { fill: none; stroke: var(--first); stroke-width: 1.8; vector-effect: non-scaling-stroke;
  stroke-linejoin: round;
  stroke-linecap: round; }
.line.lone { stroke-width: 7; }
.line.second { stroke: var(--second); }
.line.faint { opacity: .35; stroke-width: 1.2; }
.line.dashed { stroke: var(--soft); stroke-dasharray: 5 5; stroke-width: 1.4; }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); pointer-events: none; }
.dot { position: absolute; width: 9px; height: 9px; margin: -4.5px; border-radius: 50%; background:
  var(--first);
  border: 1.5px solid var(--card); pointer-events: none; }
.dot.second { background: var(--second); }
.dot.dashed { background: var(--soft); }
.still .plot i { position: absolute; width: 8px; height: 8px; margin: -4px; border-radius: 50%; opacity: .75;
  background: var(--first); } .still .plot i.second { background: var(--second); opacity: 1; z-index: 1; }
.still .plot i.faint { background: var(--soft); opacity: .45; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 6px 14px; align-items: center;
  font-size: 13.5px; } .bars i { display: block; height: 12px; border-radius: 3px; background: var(--first); }
.card { padding: 14px 16px; margin-bottom: 12px; min-width: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: normal; }
th { font-weight: 500; color: var(--soft); white-space: nowrap; }
tr:last-child > th, tr:last-child > td { border-bottom: 0; }
thead tr:last-child > th { border-bottom: 1px solid var(--rule); }
.number { text-align: right; }
.keys { width: auto; min-width: 0; }
.keys > tbody > tr > td { overflow-wrap: anywhere; }
details > summary { cursor: pointer; font-weight: 600; font-size: 14px; }
details[open] > summary { margin-bottom: 10px; }
pre { margin: 0; padding: 12px 14px; background: var(--code); border-radius: 8px; overflow: auto; max-height:
  560px;
  font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: normal; }
@media (max-width: 560px) { main { padding: 18px 12px 32px; } .tiles { grid-template-columns: 1fr 1fr; }
  .chart { padding: 12px 14px 8px 8px; } .wide .frame { grid-template-rows: 220px 20px; } h1 { font-size:
  22px; } }
@media (max-width: 560px) { .rows thead { display: none; }
  .rows > tbody > tr { display: block; padding: 6px 0;
  border-bottom: 1px solid var(--rule); } .rows > tbody > tr:last-child { border-bottom: 0; }
  .rows > tbody > tr > td { display: flex; gap: 12px; padding: 2px 0; border: 0; text-align: left;
  overflow-wrap: anywhere; } .rows > tbody > tr > td::before { content: attr(data-label); color: var(--soft);
  flex: 0 0 104px; } }
.pipeline { margin: 0 0 12px; } .pipeline svg { display: block; width: 100%; height: auto; margin-top: 8px; }
.pipeline text { font-size: 11px; fill: var(--ink); text-anchor: middle; }
.pipeline .stage { fill: var(--soft); text-anchor: start; } .pipeline .idle { fill: var(--grid); }
.task-f rect { fill: #8db4f5; } .task-b rect { fill: #f4ad7e; } .task-w rect { fill: #9bd0a5; }
.pipeline g text { fill: #171a1f; } .pipeline .second rect { filter: brightness(.82); }
.legend .task-f::before, .legend .task-b::before, .legend .task-w::before { content: ""; display: inline-block;
  width: 10px; height: 10px; margin-right: 6px; border-radius: 2px; background: #8db4f5; }
.legend .task-b::before { background: #f4ad7e; } .legend .task-w::before { background: #9bd0a5; }
.shardings { display: flex; flex-wrap: wrap; gap: 14px 28px; } .sharding { margin: 0; min-width: 0; flex: 0 1 auto; }
.sharding figcaption { display: block; margin-bottom: 6px; } .sharding figcaption small { display: block; margin: 0; }
.sharding svg { display: block; width: 100%; height: auto; } .sharding text { font-size: 12px; fill: #171a1f;
  text-anchor: middle; } .sharding .name { fill: var(--soft); text-anchor: start; }
.hue0 rect { fill: #a8c7f7; } .hue1 rect { fill: #f7c39c; } .hue2 rect { fill: #a9d8b2; } .hue3 rect { fill: #d9b8ec; }
.hue4 rect { fill: #f3d77e; } .hue5 rect { fill: #9fd8dc; } .hue6 rect { fill: #f2b3bb; } .hue7 rect { fill: #c9cdd4; }
.roofline-figure { margin: 0 0 12px; } .roofline-figure svg { display: block; width: 100%; height: auto; }
.roofline-figure .roofline text { fill: var(--soft); } .roofline-figure .roofline .name { fill: var(--ink); }
.roofline-figure .roofline .roof { stroke: var(--ink); } .roofline-figure .roofline .grid { stroke: var(--grid); }
@media print { .chart, .card { break-inside: avoid; } }
"""

# Pointing at a chart shows the values at the nearest step. Plain DOM; text is set as text, never as markup.
SCRIPT = """
document.querySelectorAll('figure.chart:not(.still)').forEach(function (figure) {
  var data = JSON.parse(figure.querySelector('script').textContent);
  var plot = figure.querySelector('.plot'), output = figure.querySelector('output');
  var rest = output.textContent, marks = [];
  function mark(name, left, top) {
    var element = document.createElement('i');
    element.className = name; element.style.left = 100 * left + '%';
    if (top !== null) element.style.top = 100 * top + '%';
    plot.appendChild(element); marks.push(element);
  }
  function clear() { marks.forEach(function (m) { m.remove(); }); marks = []; output.textContent = rest; }
  function nearest(curve, step) {
    var best = -1, distance = Infinity;
    curve.steps.forEach(function (s, i) {
      if (curve.values[i] === null || Math.abs(s - step) >= distance) return;
      distance = Math.abs(s - step); best = i;
    });
    return best;
  }
  function height(value) {
    var f = data.y[2] ? Math.log : function (v) { return v; };
    return 1 - (f(value) - f(data.y[0])) / (f(data.y[1]) - f(data.y[0]));
  }
  function show(event) {
    var box = plot.getBoundingClientRect(), width = data.x[1] - data.x[0];
    var step = data.x[0] + width * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    clear();
    var at = null, words = [];
    data.curves.forEach(function (curve) {
      var i = nearest(curve, step);
      if (i < 0) return;
      if (at === null || Math.abs(curve.steps[i] - step) < Math.abs(at - step)) at = curve.steps[i];
    });
    mark('cursor', (at - data.x[0]) / width, null);
    data.curves.forEach(function (curve) {
      var i = nearest(curve, at);
      if (i < 0) return;
      var value = curve.values[i], left = (curve.steps[i] - data.x[0]) / width;
      var apart = curve.steps[i] !== at ? ' (' + data.over + ' ' + curve.steps[i] + ')' : '';
      words.push(curve.label + ' ' + Number(value.toPrecision(5)) + apart);
      if (curve.look !== 'faint') mark('dot ' + curve.look, left, height(value));
    });
    output.textContent = [data.over + ' ' + at].concat(words).join(' \\u00b7 ') + (data.unit ? ' ' + data.unit : '');
  }
  plot.addEventListener('pointermove', show);
  plot.addEventListener('pointerdown', show);
  plot.addEventListener('pointerleave', clear);
});
"""


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
