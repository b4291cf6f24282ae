"""Draws the packages of the code and the path of a batch through them, for docs/architecture.md."""

import html
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.picture import document

ROOT = Path(__file__).resolve().parents[1]
ROWS = {
    "on top of runs": "__main__",
    "commands": "train",
    "runs": "run",
    "training": "trainer",
    "a step": "step",
    "generation of text": "decoding",
    "configuration of a run": "run_config",
    "models as arrays": "stored",
    "around a step": "local_sgd",
    "compression": "compress.config",
    "parts": "loss",
    "foundations": "observe",
    "basics": "config",
}
"""Name of each row of the drawing, from top to bottom -> its first module in the layers of `pyproject.toml`."""
WAY = (
    ("data", "rows of token ids", "in the order of the seed"),
    ("data.device_batches", "global batch", "sharded, ahead of use"),
    ("gradients", "microbatches", "over devices and stages"),
    ("models", "forward pass", "kernels chosen by dispatch"),
    ("loss", "sum and count", "large logits in chunks"),
    ("gradients", "backward pass", "reduced over the mesh"),
    ("optim", "update", "clip, weight decay, schedule"),
    ("state", "next state", "donated, sharded"),
)
"""Package -> what a batch is there, and one more line, in the order of a step."""
LETTER = 5.6
"""Width of a letter of a module's name, in pixels."""
ROOM = 14.0
"""Width of a box beside its name, and of the gap to the next one."""
BOX = '<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" fill="{fill}" stroke="var(--rule)"/>'


def text(x: float, y: float, words: str, **attributes: str) -> str:
    """Return a text element."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}"{extra}>{html.escape(words)}</text>'


def read_rows() -> dict[str, list[str]]:
    """Return the modules of `jaxstack` on each row of the drawing: those of successive layers of `pyproject.toml`."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(one["layers"] for one in contracts if one["containers"] == ["jaxstack"])
    modules = [module for layer in layers for module in layer.split(" : ")]
    starts = [*(modules.index(first) for first in ROWS.values()), len(modules)]
    assert starts == sorted(starts) and starts[0] == 0
    return {name: modules[start:end] for name, start, end in zip(ROWS, starts, starts[1:], strict=False)}


def fit_row(modules: Sequence[str], width: float) -> list[str]:
    """Return the names of a row's boxes: where the modules do not fit, those of one package share a box."""
    if sum(LETTER * len(module) + ROOM for module in modules) <= width:
        return list(modules)
    packages = [module.partition(".")[0] for module in modules]
    names = (
        package if packages.count(package) > 1 else module for module, package in zip(modules, packages, strict=True)
    )
    return list(dict.fromkeys(names))


def draw_layers() -> str:
    """Return the SVG of the layers, with the kernels beside them."""
    width = 900
    left = 180
    right = 730
    row = 40
    rows = read_rows()
    parts = []
    for index, (name, row_modules) in enumerate(rows.items()):
        modules = fit_row(row_modules, right - left)
        y = 20 + index * row
        parts.append(text(left - 14, y + 21, name, text_anchor="end", class_="soft").replace("class-", "class"))
        letters = sum(map(len, modules))
        margin = (right - left) / len(modules) - LETTER * letters / len(modules)
        x: float = left
        for module in modules:
            step = LETTER * len(module) + margin
            parts.append(BOX.format(x=f"{x:g}", y=y, w=f"{step - 6:g}", h=row - 9, fill="var(--code)"))
            parts.append(text(x + (step - 6) / 2, y + 20, module, text_anchor="middle", font_size="12"))
            x += step
    bottom = 20 + len(rows) * row - 9
    folders = sorted(path.parent.name for path in (ROOT / "pallas_kernels").glob("*/__init__.py"))
    lines = ("pallas_kernels", "", *folders)
    top = bottom - 22 * len(lines) - 18
    parts.append(BOX.format(x=right + 18, y=top, w=144, h=bottom - top, fill="var(--code)"))
    for index, line in enumerate(lines):
        soft = {"class_": "soft"} if index else {"font_weight": "600"}
        drawn = text(right + 90, top + 26 + 22 * index, line, text_anchor="middle", font_size="12", **soft)
        parts.append(drawn.replace("class-", "class"))
    caption = "Modules import from rows below, and from the right in their row. Kernels import nothing of jaxstack."
    parts.append(text(left, bottom + 28, caption, font_size="12"))
    return document(width, bottom + 46, "\n".join(parts), "The packages of jaxstack from top to bottom")


def draw_way(way: Sequence[tuple[str, str, str]] = WAY) -> str:
    """Return the SVG of the path of a batch, in two rows of boxes with arrows between them."""
    width = 860
    w = 186
    h = 86
    gap = 22
    columns = 4
    parts = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="var(--soft)"/></marker></defs>'
    ]
    arrow = '<path d="{path}" fill="none" stroke="var(--soft)" stroke-width="1.6" marker-end="url(#tip)"/>'
    for index, (package, what, more) in enumerate(way):
        x = 20 + index % columns * (w + gap)
        y = 24 + index // columns * (h + 48)
        parts.append(BOX.format(x=x, y=y, w=w, h=h, fill="var(--code)"))
        parts.append(text(x + 12, y + 24, f"jaxstack.{package}", style="fill: var(--first)", font_size="12"))
        parts.append(text(x + 12, y + 47, what, font_weight="600"))
        parts.append(text(x + 12, y + 68, more, font_size="11").replace("<text", '<text class="soft"'))
        if index % columns < columns - 1:
            parts.append(arrow.format(path=f"M{x + w + 2} {y + h / 2:g}H{x + w + gap - 3}"))
        elif index + 1 < len(way):
            lane = y + h + 24
            parts.append(arrow.format(path=f"M{x + w / 2:g} {y + h + 2}V{lane}H{20 + w / 2:g}V{y + h + 45}"))
    below = 24 + 2 * h + 48 + 34
    parts.append(
        text(20, below, "The metrics go to jaxstack.observe, every few steps the state to jaxstack.checkpoint.")
    )
    return document(width, below + 20, "\n".join(parts), "The path of a batch through the packages")


def drawings() -> dict[str, str]:
    """Return file name -> SVG."""
    return {"architecture.svg": draw_layers(), "way-of-a-batch.svg": draw_way()}
