"""Rewards of held-out prompts while a small model learns from its rewards: the tasks of docs/posttraining.md.

    python benchmarks/training/rewards.py                  # the tasks, three seeds: minutes each on two cores
    python benchmarks/training/rewards.py --tasks programs --seeds 0
    python benchmarks/training/rewards.py --together 6     # on a machine with twelve cores

The data are those that the page's own code makes. For each task and seed a model is trained on demonstrations of which
half are wrong (configs/reinforce-start.yaml), and then by the rewards of its own answers; both on a CPU in float32.
`eval_reward` is that of sampled answers, `eval_reward_greedy` that of the likeliest ones. Rows, curves included, are
appended to benchmarks/results/rewards.jsonl; the picture is benchmarks/results/rewards.svg.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.picture import Panel, draw
from benchmarks.rows import RESULTS, append_rows, print_table, require_commit

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "posttraining.md"


@dataclass(frozen=True)
class Task:
    """A task of the page: the file of its demonstrations, by which its code is found, and its two runs."""

    demonstrations: str
    start: str
    config: str
    run: str
    longer: tuple[str, ...] = ()
    """Overrides of the first run."""


TASKS = {
    "brackets": Task("demonstrations.jsonl", "reinforce-start", "reinforce-brackets.yaml", "reinforce-brackets"),
    "programs": Task(
        "programs.jsonl",
        "programs-start",
        "reinforce-programs.yaml",
        "reinforce-programs",
        ("train.steps=800", "optimizer.learning_rate=1e-3"),
    ),
    "products": Task(
        "products.jsonl",
        "products-start",
        "reinforce-products.yaml",
        "reinforce-products",
        (
            "train.steps=600",
            "train.sequence_length=96",
            "data.tokenizer={name: file, path: tokenizer.json}",
            "data.chat.template=calls.jinja",
        ),
    ),
}
COLUMNS = ("work", "variant", "start_reward", "reward", "start_reward_greedy", "reward_greedy", "minutes")


def make_data(task: Task, folder: Path) -> None:
    """Run the page's code that makes the task's data."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    code = next(block for block in blocks if f'open("{task.demonstrations}", "w")' in block)
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


def run(module: str, folder: Path, *arguments: str) -> None:
    """Run a command of jaxstack in a folder, on the CPU; its output goes to a file there."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    command = [sys.executable, "-m", f"jaxstack.{module}", *arguments]
    with (folder / f"{module}.txt").open("w") as output:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=False)
    if done.returncode:
        text = (folder / f"{module}.txt").read_text(encoding="utf-8")
        raise SystemExit(f"{' '.join(command[2:])} ended with {done.returncode}: {text[-1500:]}")


def measure(name: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Return the row of one task and seed."""
    task = TASKS[name]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make_data(task, folder)
        source = f"data.sources=[{{path: {task.demonstrations}, format: chat}}]"
        config = str(ROOT / "configs" / "reinforce-start.yaml")
        run("train", folder, "--config", config, f"run.name={task.start}", f"run.seed={seed}", source, *task.longer)
        trained = time.perf_counter()
        config = str(ROOT / "configs" / task.config)
        run("reinforce", folder, "--config", config, f"run.name={task.run}", f"run.seed={seed}", *overrides)
        lines = (folder / "runs" / task.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ended = time.perf_counter()
    metrics = [json.loads(line) for line in lines]
    curve = [[m["step"], m["eval_reward"], m["eval_reward_greedy"]] for m in metrics if "eval_reward" in m]
    row = {
        "work": f"reinforce {name}", "variant": f"seed {seed}", "implementation": "jaxstack", "device": "cpu",
        "start_reward": curve[0][1], "reward": curve[-1][1], "start_reward_greedy": curve[0][2],
        "reward_greedy": curve[-1][2], "minutes": (ended - began) / 60, "minutes_supervised": (trained - began) / 60,
        "curve": curve,
    }  # fmt: skip
    print(f"{name}, seed {seed}: {row['start_reward']:.3f} -> {row['reward']:.3f}", flush=True)
    return row


def picture(rows: Iterable[Mapping[str, Any]]) -> str:
    """Draw the rewards of sampled and of the likeliest answers against steps, a panel for each task."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        curves = panels.setdefault(row["work"].removeprefix("reinforce "), {})
        curves[row["variant"]] = [(step, sampled) for step, sampled, _ in row["curve"]]
    shown = [Panel(f"Sampled reward, {name}", "steps", dict(sorted(curves.items()))) for name, curves in panels.items()]
    return draw(shown, "Reward of held-out prompts during reinforcement learning")


def newest_rows(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last row of each task and seed."""
    return list({(row["work"], row["variant"]): row for row in rows}.values())


def main() -> None:
    """Train every task with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, metavar="TASK",
        help=f"of: {', '.join(TASKS)}")  # fmt: skip
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="one pair of runs of each task for each"
    )
    parser.add_argument("--together", type=positive(int), default=1, help="runs at a time")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides of the second run")
    args = parser.parse_args()
    require_commit("rewards")
    pairs = [(name, seed) for name in args.tasks for seed in args.seeds]

    def run_pair(pair: tuple[str, int]) -> dict[str, Any]:
        row = measure(*pair, args.set)
        append_rows("rewards", [row])
        return row

    with ThreadPoolExecutor(args.together) as pool:
        rows = list(pool.map(run_pair, pairs))
    stored = [json.loads(line) for line in (RESULTS / "rewards.jsonl").read_text(encoding="utf-8").splitlines()]
    (RESULTS / "rewards.svg").write_text(picture(newest_rows(stored)), encoding="utf-8")
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
