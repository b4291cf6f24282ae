"""The HTML report of a study: best trial so far, curves of all trials, importance of each hyperparameter."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxstack.files import write_file
from jaxstack.observe.number_format import duration, short_number
from jaxstack.observe.report.chart import Chart, Curve, Point, Scatter, render_chart, render_scatter
from jaxstack.observe.report.markup import SCRIPT, row_table
from jaxstack.observe.report.page import Tile, page_head, render_tiles
from jaxstack.observe.report.series import make_series
from jaxstack.tune.optuna_study import TrialRecord, best_of
from jaxstack.tune.space import Dimension, Range, SearchSpace, StudyConfig

_MAX_CURVES = 100
"""Number of trials whose curves are drawn: the newest ones, and the best."""
_FOOTER = (
    "<footer>Importance: PED-ANOVA (Watanabe et al. 2023), over trials that are complete. A grey point or curve is a "
    "trial that was stopped early. Written by jaxstack.</footer>"
)


def write_report(
    directory: Path,
    config: StudyConfig,
    records: Sequence[TrialRecord],
    importance: Mapping[str, float],
    space: SearchSpace,
    best_yaml: str,
) -> Path:
    """Write the report of a hyperparameter study to `report.html` in its directory; return the path.

    Args:
      directory: directory of the study.
      config: the study.
      records: its trials.
      importance: `section.key` -> share of the variation of the loss; may be empty.
      space: the search space.
      best_yaml: the best configuration; empty if no trial is complete.
    """
    best = best_of(list(records))
    yaml_block = f"<h2>Best configuration (best.yaml)</h2><pre>{html.escape(best_yaml)}</pre>" if best_yaml else ""
    trials = f'<h2>Trials</h2><div class="card">{row_table([_row(r) for r in records])}</div>' if records else ""
    page = "\n".join(
        [
            page_head(config.name),
            f"<h1>{html.escape(config.name)}</h1>",
            f'<p class="lead">{html.escape(_lead(config, space))}</p>',
            render_tiles(_tiles(config, records, best)),
            _charts(config, records, best),
            _values(config, records, best, space),
            _importance(importance),
            yaml_block,
            trials,
            _FOOTER,
            f"</main><script>{SCRIPT}</script></body></html>",
        ]
    )
    path = directory / "report.html"
    write_file(path, page.encode(), durable=False)
    return path


def _lead(config: StudyConfig, space: SearchSpace) -> str:
    samplers = {"tpe": "tree-structured Parzen estimator", "gp": "Gaussian process", "random": "random search"}
    return f"{config.trials} trials of {space.origin} · {samplers[config.sampler]} · pruner: {config.pruner}"


def _tiles(config: StudyConfig, records: Sequence[TrialRecord], best: TrialRecord | None) -> list[Tile]:
    counts = {state: sum(record.state == state for record in records) for state in ("complete", "pruned", "memory")}
    failed = sum(record.state in ("failed", "configuration") for record in records)
    spent = sum(record.seconds or 0.0 for record in records)
    first = next((record for record in records if record.value is not None), None)
    tiles: list[Tile] = []
    for label, record in (("Best", best), ("First", first)):
        if record is not None and record.value is not None:
            tiles.append((label, f"{record.value:.4f}", f"{config.metric}, trial {record.number}"))
    return [
        *tiles,
        ("Complete", str(counts["complete"]), f"of {config.trials}"),
        ("Pruned", str(counts["pruned"]), "stopped early"),
        ("Do not fit", str(counts["memory"]), "out of memory") if counts["memory"] else None,
        ("Failed", str(failed), "see the table") if failed else None,
        ("Time of all trials", duration(spent), ""),
    ]


def _charts(config: StudyConfig, records: Sequence[TrialRecord], best: TrialRecord | None) -> str:
    known = [record for record in records if record.value is not None]
    so_far = np.minimum.accumulate([record.value for record in known]) if known else []
    progress = Chart(
        "Best so far",
        [
            Curve("trial", make_series((r.number, r.value) for r in known), "faint"),
            Curve("best so far", make_series((r.number, v) for r, v in zip(known, so_far, strict=True))),
        ],
        config.metric,
        over="trial",
        wide=True,
    )
    shown = [record for record in records if record is not best][-_MAX_CURVES:]
    curves = [
        Curve(f"trial {r.number}", make_series(r.curve), "dashed" if r.state == "pruned" else "faint")
        for r in shown
        if r.curve
    ]
    if best is not None:
        curves.append(Curve(f"trial {best.number} (best)", make_series(best.curve), "second"))
    drawn = render_chart(progress) + render_chart(Chart("Trials", curves, config.metric, wide=True, many=True))
    return f'<h2>Curves</h2><div class="charts">{drawn}</div>' if drawn else ""


def _values(config: StudyConfig, records: Sequence[TrialRecord], best: TrialRecord | None, space: SearchSpace) -> str:
    figures = [
        render_scatter(_scatter(key, dimension, config, records, best)) for key, dimension in space.dimensions.items()
    ]
    return f'<h2>Loss by value</h2><div class="charts">{"".join(figures)}</div>' if any(figures) else ""


def _scatter(
    key: str, dimension: Dimension, config: StudyConfig, records: Sequence[TrialRecord], best: TrialRecord | None
) -> Scatter:
    points = []
    for record in records:
        last = record.curve[-1][1] if record.state == "pruned" and record.curve else None
        value = record.value if record.value is not None else last
        if value is None or key not in record.values:
            continue
        found = record.values[key]
        at = float(found) if isinstance(dimension, Range) else float(dimension.values.index(found))
        look = "second" if record is best else "faint" if record.value is None else "first"
        tip = f"trial {record.number}: {_text(found)}, {config.metric} {value:.4f}"
        points.append(Point(at, value, tip, look))
    if isinstance(dimension, Range):
        return Scatter(key, points, float(dimension.low), float(dimension.high), dimension.log)
    texts = [_text(value) for value in dimension.values]
    return Scatter(key, points, -0.5, len(texts) - 0.5, labels=texts)


def _importance(importance: Mapping[str, float]) -> str:
    if not importance:
        return ""
    largest = max(importance.values()) or 1.0
    rows = "".join(
        f'<span>{html.escape(key)}</span><i style="width:{100 * value / largest:.1f}%"></i>'
        f"<span>{100 * value:.0f} %</span>"
        for key, value in sorted(importance.items(), key=lambda item: -item[1])
    )
    return f'<h2>Importance</h2><div class="card bars">{rows}</div>'


def _row(record: TrialRecord) -> dict[str, Any]:
    values = {key: _text(value) for key, value in record.values.items()}
    loss = f"{record.value:.4f}" if record.value is not None else ""
    time = duration(record.seconds) if record.seconds is not None else ""
    return {"trial": record.number, "state": record.state, "loss": loss, **values, "time": time, "note": record.reason}


def _text(value: object) -> str:
    if isinstance(value, float):
        return short_number(value, 4)
    return value if isinstance(value, str) else json.dumps(value)
