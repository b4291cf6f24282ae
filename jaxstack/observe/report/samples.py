"""The section of the report with answers that a run of reinforcement learning has sampled."""

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SAMPLES = "samples.json"
"""File of a run directory with answers of the newest rollout."""
_LONGEST = 4000
"""Characters of a message that are shown."""


def render_samples(run_dir: Path) -> str:
    """Return the newest answers with their turns and rewards as HTML; "" if there are none, or the file is damaged."""
    try:
        found = json.loads((run_dir / SAMPLES).read_text(encoding="utf-8"))
        cards = [_card(sample) for sample in found["samples"]]
        return f"<h2>Newest answers (rollout {int(found['rollout'])})</h2>{''.join(cards)}" if cards else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _card(sample: Mapping[str, Any]) -> str:
    prompt = sample["prompt"]
    before = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
    title = f"Reward {sample['reward']:.3f}" + ", cut at the limit of tokens" * bool(sample["truncated"])
    parts = sample["rewards"]
    if len(parts) > 1:
        title += " (" + ", ".join(f"{name} {value:.3f}" for name, value in parts.items()) + ")"
    rows = "".join(_row(str(x["role"]), str(x["content"])) for x in [*before, *sample["messages"]])
    problems = "".join(_row("problem", text) for text in sample["problems"])
    return f'<div class="card"><h3>{html.escape(title)}</h3><table>{rows}{problems}</table></div>'


def _row(name: str, text: str) -> str:
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"<tr><td>{html.escape(name)}</td><td><pre>{html.escape(shown)}</pre></td></tr>"
