"""The measured parts of docs/posttraining.md: rewards of the tasks, and the speed of a step beside TRL's."""

from collections.abc import Callable

from benchmarks.training.rewards import TASKS, newest_rows, picture
from jaxstack.observe.number_format import plural
from scripts.pages.page import Page, table, table_of
from scripts.pages.rows import RESULTS, Row, read_all

SPEED = {
    "": "{implementation}",
    "samples/s": "{samples_per_second:.1f}",
    "seconds a step": "{step_seconds:.2f}",
    "rollout": "{rollout_seconds:.2f} s",
    "training": "{train_seconds:.2f} s",
    "weights": "{weights}",
    "memory": lambda row: f"{row['peak_memory_bytes'] / 2**30:.0f} GiB",
}
_WORK = "llama3-1b 32"
"""Beginning of the name of the work that TRL is measured on too."""


def rewards(task: str) -> Callable[[], str]:
    """Return a function that makes the table of a task: rewards by step, a value for each seed."""

    def make() -> str:
        found = [row for row in read_all(RESULTS / "rewards.jsonl") if row["work"] == f"reinforce {task}"]
        rows = sorted(newest_rows(found), key=lambda row: row["variant"])
        lines = [
            [f"{step:,}", _values(rows, number, 1), _values(rows, number, 2)]
            for number, (step, *_) in enumerate(rows[0]["curve"])
        ]
        minutes = max(row["minutes"] for row in rows)
        source = (
            f"{plural(len(rows), 'seed')} (`run.seed`), each with its own start; float32 on a CPU, both runs together "
            f"at most {minutes:.1f} minutes, {rows[-1]['date'][:10]}, commit {rows[-1]['commit'][:7]}."
        )
        return table(["step", "sampled answers", "likeliest answers"], lines) + f"\n\n{source}"

    return make


def _values(rows: list[Row], number: int, column: int) -> str:
    return ", ".join(f"{row['curve'][number][column]:.3f}" for row in rows)


def speeds() -> str:
    """Return the table of a step's speed, ours and TRL's of the newest run, and how they compare."""
    rows = [row for row in read_all(RESULTS / "reinforce.jsonl") if row["work"].startswith(_WORK)]
    last = next(row["run"] for row in reversed(rows) if row["implementation"].startswith("TRL"))
    newest = [row for row in rows if row["run"] == last]
    ours = next(row for row in newest if row["implementation"] == "jaxstack")
    peers = [row for row in newest if row["implementation"].startswith("TRL")]
    fastest = max(peers, key=lambda row: row["samples_per_second"])
    said = (
        f"{ours['work']}; {ours['device']}, {ours['date'][:10]}, commit {ours['commit'][:7]}. jaxstack takes "
        f"{ours['samples_per_second'] / fastest['samples_per_second']:.1f} times as many samples a second as "
        f"{fastest['implementation']}, and spends {ours['rollout_share']:.0%} of a step in rollouts."
    )
    return f"{table_of(SPEED, newest)}\n\n{said}"


def ways() -> str:
    """Return the table of our step with exact log-probabilities beside the usual one, on two GPUs, and of an 8B."""
    rows = read_all(RESULTS / "reinforce.jsonl")
    last = next(row["run"] for row in reversed(rows) if row["implementation"] == "jaxstack, exact")
    usual, exact = (row for row in rows if row["run"] == last)
    both = next(row for row in reversed(rows) if row["work"].startswith("llama3-1b-fsdp2"))
    lines = [{**usual, "implementation": "one GPU"}, {**exact, "implementation": "one GPU, exact"}]
    lines.append({**both, "implementation": "two GPUs, fsdp 2"})
    adapters = [row for row in rows if row["work"].startswith("llama3-8b-lora")][-1:]
    lines += [{**row, "implementation": "llama3-8b on one GPU, adapters"} for row in adapters]
    commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in (usual, both, *adapters)))
    said = (
        f"{usual['work']}; {usual['device']}, commit {commits}. A step with exact log-probabilities takes "
        f"{exact['step_seconds'] / usual['step_seconds']:.2f} times as long; two GPUs take "
        f"{both['samples_per_second'] / usual['samples_per_second']:.2f} times as many samples a second as one."
    )
    return f"{table_of(SPEED, lines)}\n\n{said}"


def pictures() -> dict[str, str]:
    """Return the picture of the rewards."""
    return {"rewards.svg": picture(newest_rows(read_all(RESULTS / "rewards.jsonl")))}


PARTS = {**{task: rewards(task) for task in TASKS}, "speed": speeds, "ways": ways}
PAGES = (Page("posttraining.md", PARTS, pictures),)
