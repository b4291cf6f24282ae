"""The measured part of docs/models.md: hybrids of recurrent layers and attention beside a Transformer."""

from benchmarks.training.mixers import BASE, picture
from scripts.pages.page import Page, table
from scripts.pages.rows import RESULTS, Row, newest_rows, read_all


def _rows() -> list[Row]:
    return sorted(newest_rows(read_all(RESULTS / "mixers.jsonl")), key=lambda row: row["variant"])


def hybrids() -> str:
    """Return the table of losses, a value for each seed, and where they were measured."""
    models: dict[str, list[Row]] = {BASE: []}
    for row in _rows():
        models.setdefault(row["variant"].rpartition(", ")[0], []).append(row)
    lines = [
        [
            model,
            f"{rows[0]['parameters'] / 1e6:.1f} million",
            *(", ".join(f"{row[key]:.3f}" for row in rows) for key in ("final_loss", "eval_loss")),
            # A model may be drawn in a later run than the Transformer of the same seeds.
            ", ".join(
                f"{row['eval_loss'] / base['eval_loss']:.3f}" for row, base in zip(rows, models[BASE], strict=True)
            ),
        ]
        for model, rows in models.items()
    ]
    titles = ["model", "parameters", "loss, last tenth", "held-out loss", "ratio to the Transformer's"]
    last = models[BASE][-1]
    commits = ", ".join(f"{model}: commit {rows[-1]['commit'][:7]}" for model, rows in models.items())
    source = f"{last['tokens'] / 1e6:.1f} million tokens in steps of 32 x 1024; {last['device']}; {commits}."
    return f"{table(titles, lines)}\n\n{source}"


def pictures() -> dict[str, str]:
    """Return the picture of the losses."""
    return {"mixers.svg": picture(_rows())}


PAGES = (Page("models.md", {"hybrids": hybrids}, pictures),)
