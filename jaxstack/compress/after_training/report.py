"""The report of a compression: bytes, errors and held-out losses, as lines, as JSON and as an HTML page."""

import dataclasses
import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxstack.files import write_file, write_json
from jaxstack.observe.number_format import byte_size
from jaxstack.observe.report.chart import Chart, Curve, render_chart
from jaxstack.observe.report.markup import SCRIPT, row_table
from jaxstack.observe.report.page import Tile, page_head, render_tiles
from jaxstack.observe.report.series import make_series
from jaxstack.run.evaluate import TextLoss

RECORD = "compression.json"
_NOTABLE = 1.005
"""Ratio of sizes from which on one counts as larger than the other."""
_FOOTER = (
    "<footer>Bytes before: 2 a weight, as in bfloat16. Error: squared Frobenius norm of the difference of the weights "
    "divided by that of the weights. Written by jaxstack.</footer>"
)


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """Size of one weight before and after compression, and its error.

    Attributes:
      path: its path in the model.
      layer: number of the Transformer layer, `embedding` or `head`.
      method: method of the recipe that compressed it; keep: none.
      shape: of the matrix, (out, in), or of those of all experts, (experts, out, in).
      bytes_before, bytes_after: 2 a weight, and as stored.
      error: relative squared error of the weight, |W' - W|^2 / |W|^2.
      zeros: share of zeros.
      output_error: relative squared error of the layer's output over the calibration text, where it was measured.
    """

    path: str
    layer: str
    method: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    error: float
    zeros: float
    output_error: float | None = None

    @property
    def bits(self) -> float:
        """Bits per weight as stored."""
        return 8 * self.bytes_after / math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class CompressionReport:
    """Sizes and losses of a model before and after compression.

    Attributes:
      source: directory of the model.
      step: step of its checkpoint.
      bytes_before: bytes of all parameters at 2 each.
      bytes_after: bytes of all parameters as stored.
      loss_before, loss_after: on the held-out text; None if there is none.
      rows: the weights in the order of the forward pass.
      loss_by_layer: loss in nats with one layer compressed and all others as before, by layer; `none`: without any.
      expert_tokens: calibration tokens that the router sends to each expert, by the path of the mixture.
    """

    source: str
    step: int
    bytes_before: int
    bytes_after: int
    loss_before: TextLoss | None
    loss_after: TextLoss | None
    rows: Sequence[WeightRow]
    loss_by_layer: dict[str, float]
    expert_tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def layers(self) -> dict[str, list[WeightRow]]:
        """Return the compressed weights' rows of the report, grouped by layer."""
        found: dict[str, list[WeightRow]] = {}
        for row in self.rows:
            found.setdefault(row.layer, []).append(row)
        return found


def _saving(report: CompressionReport) -> str:
    """Return in words how much smaller the weights became."""
    ratio = report.bytes_before / max(report.bytes_after, 1)
    if ratio >= _NOTABLE:
        return f"{ratio:.2f}x smaller"
    if report.bytes_after > report.bytes_before * _NOTABLE:
        return f"{1 / ratio:.2f}x larger"
    return "no smaller: the recipe changes values and stores as many of them, zeros too"


def summary_lines(report: CompressionReport) -> list[str]:
    """Return the report as lines for a terminal: a table of layers, then bytes and perplexity before and after."""
    header = ("layer", "methods", "before", "after", "bits", "error", "perplexity alone")
    table = [header, *(_cells(report, layer, rows) for layer, rows in report.layers().items())]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = ["  ".join(_aligned(cell, widths[i], i > 1) for i, cell in enumerate(row)).rstrip() for row in table]
    lines.append(
        f"bytes: {byte_size(report.bytes_before)} in bfloat16 -> {byte_size(report.bytes_after)} ({_saving(report)})"
    )
    if (uncompressed := report.loss_by_layer.get("none")) is not None:
        # Layers are measured on fewer tokens than the whole model, whose perplexity is another one.
        alone = math.exp(uncompressed)
        lines.append(
            f"perplexity alone is that of the first held-out tokens; with no layer compressed it is {alone:.4f}"
        )
    if report.loss_before is not None and report.loss_after is not None:
        before = report.loss_before
        after = report.loss_after
        change = after.perplexity / before.perplexity - 1
        lines.append(
            f"held-out perplexity over {int(after.tokens):,} tokens: {before.perplexity:.4f} -> {after.perplexity:.4f} "
            f"({change:+.2%})"
        )
    return lines


def _aligned(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _cells(report: CompressionReport, layer: str, rows: Sequence[WeightRow]) -> tuple[str, ...]:
    before = sum(row.bytes_before for row in rows)
    after = sum(row.bytes_after for row in rows)
    weights = sum(math.prod(row.shape) for row in rows)
    alone = report.loss_by_layer.get(layer)
    return (
        layer,
        ", ".join(dict.fromkeys(row.method for row in rows)),
        byte_size(before),
        byte_size(after),
        f"{8 * after / weights:.2f}",
        f"{_mean_error(rows):.2e}",
        "-" if alone is None else f"{math.exp(alone):.4f}",
    )


def _mean_error(rows: Sequence[WeightRow]) -> float:
    """Return the mean of the weights' relative errors, weighted by the sizes of their matrices."""
    sizes = [math.prod(row.shape) for row in rows]
    return sum(size * row.error for size, row in zip(sizes, rows, strict=True)) / sum(sizes)


def write_report(directory: Path, report: CompressionReport, recipe: str) -> Path:
    """Write `compression.json` and `report.html` into the directory of a compressed model; return the page's path.

    Args:
      recipe: the recipe as YAML.
    """
    write_json(directory / RECORD, dataclasses.asdict(report))
    name = directory.resolve().name
    page = "\n".join(
        [
            page_head(name),
            f"<h1>{html.escape(name)}</h1>",
            f'<p class="lead">{html.escape(f"compressed from {report.source}, step {report.step}")}</p>',
            render_tiles(_tiles(report)),
            f'<h2>By layer</h2><div class="charts">{_charts(report)}</div>',
            f'<h2>Weights</h2><div class="card">{row_table([_table_row(row) for row in report.rows])}</div>',
            f"<h2>Recipe</h2><pre>{html.escape(recipe)}</pre>",
            _FOOTER,
            f"</main><script>{SCRIPT}</script></body></html>",
        ]
    )
    path = directory / "report.html"
    write_file(path, page.encode(), durable=False)
    return path


def _tiles(report: CompressionReport) -> list[Tile]:
    tiles: list[Tile] = [
        ("Bytes", byte_size(report.bytes_after), f"{_saving(report)}; {byte_size(report.bytes_before)} before"),
    ]
    if report.loss_before is not None and report.loss_after is not None:
        before = report.loss_before.perplexity
        after = report.loss_after.perplexity
        tiles.append(("Perplexity before", f"{before:.3f}", f"{int(report.loss_before.tokens):,} held-out tokens"))
        tiles.append(("Perplexity after", f"{after:.3f}", f"{after / before - 1:+.2%}"))
    compressed = [row for row in report.rows if row.method != "keep"]
    tiles.append(("Compressed", str(len(compressed)), f"of {len(report.rows)} weights"))
    return tiles


def _charts(report: CompressionReport) -> str:
    layers = {layer: rows for layer, rows in report.layers().items() if layer.isdigit()}
    numbers = [int(layer) for layer in layers]
    alone = [(n, report.loss_by_layer.get(str(n))) for n in numbers]
    known = [(n, math.exp(loss)) for n, loss in alone if loss is not None]
    curves = [Curve("this layer alone compressed", make_series(known))]
    if known:
        base = math.exp(report.loss_by_layer["none"])
        curves.append(Curve("no layer compressed", make_series((n, base) for n, _ in known), "dashed"))
    kinds = dict.fromkeys(row.path.split("/", 3)[-1] for rows in layers.values() for row in rows)
    errors = [
        Curve(kind, make_series((int(row.layer), row.error) for row in report.rows if row.path.endswith(kind)), "faint")
        for kind in kinds
    ]
    sizes = [
        Curve("before", make_series((n, sum(r.bytes_before for r in layers[str(n)])) for n in numbers)),
        Curve("after", make_series((n, sum(r.bytes_after for r in layers[str(n)])) for n in numbers), "second"),
    ]
    charts = [
        Chart("Perplexity", curves, over="layer", wide=True),
        Chart("Bytes", sizes, "bytes", over="layer", from_zero=True),
        Chart("Relative squared error of each weight", errors, over="layer", many=True),
    ]
    return "".join(map(render_chart, charts))


def _table_row(row: WeightRow) -> dict[str, Any]:
    return {
        "weight": row.path,
        "method": row.method,
        "out": row.shape[-2],
        "in": row.shape[-1],
        "before_bytes": row.bytes_before,
        "after_bytes": row.bytes_after,
        "bits per weight": round(row.bits, 3),
        "error": f"{row.error:.3e}",
        "output error": None if row.output_error is None else f"{row.output_error:.3e}",
        "zeros": f"{row.zeros:.1%}",
    }
