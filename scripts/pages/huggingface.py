"""The measured part of docs/huggingface.md: how closely each family computes what transformers computes."""

from scripts.pages.page import Page, table_of
from scripts.pages.rows import RESULTS, newest_rows, read_all

COLUMNS = {
    "files": "`{work}`",
    "largest logit": "{largest_logit:.2f}",
    "largest difference": "{logits_difference:.1e}",
    "equal greedy tokens": "{greedy_tokens} of {greedy_expected}",
}


def families() -> str:
    """Return the table, and where it was measured."""
    rows = sorted(newest_rows(read_all(RESULTS / "families.jsonl")), key=lambda row: row["work"])
    last = rows[-1]
    return f"{table_of(COLUMNS, rows)}\n\nFloat32 on a CPU, {last['date'][:10]}, commit {last['commit'][:7]}."


PAGES = (Page("huggingface.md", {"families": families}),)
