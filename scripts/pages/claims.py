"""docs/claims.md: every claim with what was run for it, the result, the commit and a verdict.

claims.yaml lists the claims and what shows each; results come from the rows of benchmarks. A verdict without a row or a
test, or one that its row contradicts, is an error. A row whose code has changed since its commit bears a mark.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scripts.pages import compression_cache, fields, performance, tuning
from scripts.pages.page import Page, escaped, table
from scripts.pages.row_tables import link_to_rows
from scripts.pages.rows import RESULTS, ROOT, Row, compare, newest_rows, read_all
from scripts.pages.stale import has_history, is_stale

LIST = ROOT / "scripts" / "pages" / "claims.yaml"
VERDICTS = ("met", "missed", "in part", "not shown")
MARK = "†"
"""Mark of a result whose code has changed since its commit, or whose commit is in no history here."""
TITLES = ("technique", "claim", "what was run", "result", "commit", "date", "verdict")
MODEL_CODE = (
    "attention/base.py", "attention/latent.py", "attention/softmax.py", "block.py", "config.py", "embedding.py",
    "initialization.py", "layer.py", "linear.py", "mixers", "mlp.py", "moe", "moe_layer.py", "norm.py", "remat.py",
    "rope.py", "stack.py", "transformer.py",
)  # fmt: skip
KERNEL_CODE = ("attention", "cross_entropy", "fused_mlp", "grouped_gemm", "hopper", "normalization", "pointwise")
STEP_CODE = (
    *(f"jaxstack/models/{name}" for name in MODEL_CODE),
    *(f"pallas_kernels/{name}" for name in KERNEL_CODE),
    *(f"jaxstack/{name}" for name in ("gradients", "loss.py", "optim/build.py", "step.py")),
)
"""Paths of the code that computes a train step; claims.yaml calls them `train step`."""

SUMMARIES = {
    "cache_formats": compression_cache.read_formats,
    "optimizers": tuning.optimizer_rows,
    "tune_search": tuning.search_rows,
}
"""File of results -> function that returns what claims are about, such as means over seeds, in place of its rows, from
the folder of results."""


class ClaimError(SystemExit):
    """A claim whose evidence is missing or says something else than its verdict."""


@dataclass(frozen=True)
class Result:
    """A row as evidence: what was run, and its value beside the goal."""

    row: Row
    shown: str
    """The value in words."""
    code: tuple[str, ...]
    """Paths whose code the row measured."""
    reached: bool | None = None
    """True if the value reaches the goal; None: the claim has no goal for it."""
    file: str = field(default="train_step", compare=False)
    """File of results that has the row."""


@dataclass(frozen=True)
class Claim:
    """A claim, its verdict and what shows it."""

    technique: str
    claim: str
    verdict: str
    results: Sequence[Result] = ()
    tests: Sequence[str] = ()
    missing: str = ""
    """Parts of the claim without evidence, as text."""
    runs: Mapping[str, int] = field(default_factory=dict)
    """Commands that would show them -> the number of GPUs that they need."""
    section: str = field(default="", compare=False)

    def check(self) -> None:
        """Check that the verdict has evidence which does not contradict it.

        Raises:
          ClaimError: it has none, or a row contradicts it, or a test is missing.
        """
        name = f"claims: {self.technique}: {self.claim}"
        if self.verdict not in VERDICTS:
            raise ClaimError(f"{name}: the verdict is {self.verdict!r}, not one of {', '.join(VERDICTS)}.")
        if self.verdict != "not shown" and not self.results and not self.tests:
            raise ClaimError(f"{name}: {self.verdict!r} needs a row or a test; without any it is 'not shown'.")
        if self.verdict in ("in part", "not shown") and not self.missing:
            raise ClaimError(f"{name}: {self.verdict!r} needs `missing`, which says what is not shown.")
        reached = [result.reached for result in self.results if result.reached is not None]
        if (self.verdict == "met" and not all(reached)) or (self.verdict == "missed" and reached and all(reached)):
            raise ClaimError(f"{name}: the verdict is {self.verdict!r}, but the newest rows say otherwise.")
        if absent := [path for path in self.tests if not (ROOT / path).exists()]:
            raise ClaimError(f"{name}: there is no {absent[0]}.")


def read_claims() -> list[Claim]:
    """Return the claims with the stored results, see `gather_claims`.

    Raises:
      ClaimError: see `Claim.check`; or no row is as claims.yaml describes it.
    """
    claims = gather_claims(RESULTS)
    for claim in claims:
        claim.check()
    return claims


def gather_claims(results: Path) -> list[Claim]:
    """Return the claims of claims.yaml, those of the main workloads, and those of the examples of other fields.

    Args:
      results: folder with the rows of the benchmarks.

    Raises:
      ClaimError: no row is as claims.yaml describes it.
    """
    listed = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    claims = [_listed(section, entry, results) for section, entries in listed.items() for entry in entries]
    return [*claims, *_workloads(results), *_examples(results)]


def _listed(section: str, entry: Mapping[str, Any], results: Path) -> Claim:
    name = f"claims.yaml: {entry['technique']}"
    rows = entry.get("rows", ())
    return Claim(
        entry["technique"],
        entry["claim"],
        entry["verdict"],
        [result for described in rows for result in _results(name, described, results, rows)],
        [f"tests/{path}" for path in entry.get("tests", ())],
        entry.get("missing", ""),
        entry.get("runs", {}),
        section,
    )


def _results(
    name: str, described: Mapping[str, Any], results: Path, listed: Sequence[Mapping[str, Any]] = ()
) -> list[Result]:
    """Return the newest rows that claims.yaml describes: `file`, `where`, `show`, `code`, `at_least` and `at_most`.

    Of a file in `SUMMARIES` these are what it returns. There is one for each work, implementation, variant and device
    that `where` leaves open. With `beside` goals are times the values of the newest row that this one of `listed`, the
    descriptions of the claim, has.
    """
    where = described.get("where", {})
    file = described["file"]
    stored = SUMMARIES[file](results) if file in SUMMARIES else read_all(results / f"{file}.jsonl")
    rows = [row for row in stored if _fits(row, where)]
    if not rows:
        raise ClaimError(f"{name}: no row of {described['file']} that can be repeated has {where}.")
    bases = _results(name, listed[described["beside"]], results, listed) if "beside" in described else []
    if len(bases) > 1:
        raise ClaimError(
            f"{name}: the row beside which one is claimed is not one but {len(bases)}; give more of where."
        )
    base = bases[0].row if bases else None
    if other := [row for row in newest_rows(rows) if base and row["commit"] != base["commit"]]:
        raise ClaimError(
            f"{name}: the row of {file} that has {where} is of commit {other[0]['commit'][:7]}, and the one beside "
            f"which it is claimed of {base['commit'][:7] if base else ''}; measure both again in one run."
        )
    code = tuple(one for path in described["code"] for one in (STEP_CODE if path == "train step" else (path,)))
    if absent := [path for path in code if not (ROOT / path).exists()]:
        raise ClaimError(f"{name}: there is no {absent[0]}, which a row of {described['file']} measures.")
    try:
        return [
            Result(row, described["show"].format_map(row), code, _reached(row, described, base), file)
            for row in newest_rows(rows)
        ]
    except KeyError as error:
        raise ClaimError(f"{name}: a row of {described['file']} that has {where} has no {error}.") from None


def _reached(row: Row, described: Mapping[str, Any], base: Row | None = None) -> bool | None:
    """Return whether the values of a row reach the goals `at_least` and `at_most`; None if there are none.

    With a row `base` a goal is times its value.
    """
    goals = [(value, goal, 1) for value, goal in described.get("at_least", {}).items()]
    goals += [(value, goal, -1) for value, goal in described.get("at_most", {}).items()]
    if base is not None:
        goals = [(value, goal * base[value], sign) for value, goal, sign in goals]
    reached = (row[value] is not None and sign * row[value] >= sign * goal for value, goal, sign in goals)
    return all(reached) if goals else None


def _fits(row: Row, where: Mapping[str, Any]) -> bool:
    return all(row.get(key) == value for key, value in where.items())


def _workloads(results: Path) -> Iterable[Claim]:
    """Return a claim for each main workload: its speed over that of the fastest peer of the same run.

    A workload that is measured on several numbers of GPUs is shown with the most that have a peer.
    """
    rows = read_all(results / "train_step.jsonl")
    for title, works in _works_of_titles().items():
        goal = performance.GOALS[works[0]]
        found = [one for work in works if (one := compare(work, rows, ())) and one.peer]
        claim = f"at least {goal:.2f} times the fastest peer of the same run"
        best = max(found, key=lambda one: one.ours["devices"], default=None)
        if best is None or best.ratio is None:
            split = re.search(r" (?:fsdp|context)(\d)", works[0])
            # What a whole forward pass keeps of such a text does not fit into two GPUs.
            variant = " --variants 'unrolled, save_attention'" * ("context" in works[0])
            command = f"python benchmarks/training/train_step.py '{works[0]}'{variant} --peers torchtitan --together"
            runs = {command: int(split[1]) if split else 1}
            missing = "no peer in the same run"
            yield Claim(title, claim, "not shown", missing=missing, runs=runs, section="Main workloads")
            continue
        devices = best.ours["devices"]
        shown = f"{best.ratio:.2f}" + f" on {devices} GPUs" * (devices > 1)
        result = Result(best.ours, shown, STEP_CODE, best.ratio >= goal)
        yield Claim(title, claim, "met" if result.reached else "missed", [result], section="Main workloads")


def _works_of_titles() -> Mapping[str, Sequence[str]]:
    """Return the main works of each title: the same work on several numbers of GPUs."""
    works: dict[str, list[str]] = {}
    for work, title in performance.WORKS.items():
        works.setdefault(title, []).append(work)
    return works


def _examples(results: Path) -> Iterable[Claim]:
    """Return a claim for each example of another field."""
    for row in fields.newest_rows(results):
        missed = [criterion for criterion, met in row["checks"].items() if not met]
        why = "; ".join([*missed, *filter(None, [row.get("bound")])]) if missed else ""
        shown = f"{row['measure']}: {fields.number(row['ours'])}"
        code = (f"docs/examples/fields/{row['work']}.py", "jaxstack/trainer.py", "jaxstack/step.py")
        result = Result(row, shown, code, not missed, "fields")
        verdict = "missed" if missed else "met"
        section = "Examples of other fields"
        yield Claim(fields.title(row), row["claim"], verdict, [result], missing=why, section=section)


def mark(result: Result) -> str:
    """Return the mark of a stale result, or nothing."""
    return f" {MARK}" if is_stale(str(result.row["commit"]), result.code) else ""


def claims_table(claims: Iterable[Claim]) -> str:
    """Return the table of claims, with a line for each."""
    return table(TITLES, (_line(claim) for claim in claims))


def _line(claim: Claim) -> list[str]:
    ran = [f"`{result.row['command']}` ({result.row.get('device', 'cpu')})" for result in claim.results]
    ran += [f"`{path}`" for path in claim.tests]
    shown = [f"{result.shown}{mark(result)}" for result in claim.results]
    shown += ["its tests pass"] if claim.tests else []
    commits = [f"[{str(result.row['commit'])[:7]}]({link_to_rows(result.file)})" for result in claim.results]
    commits += ["each"] * bool(claim.tests)
    dates = [str(result.row["date"])[:10] for result in claim.results]
    verdict = claim.verdict if claim.verdict == "met" else f"**{claim.verdict}**"
    verdict += f": {claim.missing}" if claim.missing else ""
    verdict += "".join(f"; to be run: `{run}`" for run in claim.runs)
    cells = [
        claim.technique,
        claim.claim,
        *("; ".join(dict.fromkeys(c)) for c in (ran, shown, commits, dates)),
        verdict,
    ]
    return [escaped(cell) or "–" for cell in cells]


OPENING = """\
# Claims

After this page you know what jaxstack claims, what was run for each claim, and which claims are not met or not shown.

<!-- Made by `python -m scripts.pages claims` from scripts/pages/claims.yaml and benchmarks/results/. Do not edit. -->

"""
READING = f"""
- **what was run** is the command of a row of results, or tests. Tests run with every change (exhaustive ones as
  far as the time of `.ci/run` allows), so their commit is *each*.
- **commit** is that of a row, and leads to the table that shows it.
- `python -m scripts.repeat NAME` runs the commands of a claim again, and shows their results beside these;
  `--list` prints all commands with the devices that they need.
- **verdict**: *met*; *missed*: the newest row does not reach the claim; *in part* and *not shown* say what is missing.
- {MARK} The code that the row measured has changed since its commit, or the commit is not in this repository's history:
  the result may have changed too. Of a time or a loss this is all that ran, of a ratio what its two sides differ in.
  Comments, docstrings and layout are no code: files are compared as syntax trees (`scripts/pages/stale.py`).

"""


def make_page(text: str) -> str:
    """Return the page; the present one where no history says which rows are stale."""
    if not has_history():
        return text
    claims = read_claims()
    counts = [f"{sum(claim.verdict == verdict for claim in claims)} {verdict}" for verdict in VERDICTS]
    stale = sum(bool(mark(result)) for claim in claims for result in claim.results)
    total = sum(len(claim.results) for claim in claims)
    parts = [OPENING, f"Of {len(claims)} claims: {', '.join(counts)}. {stale} of {total} rows bear the mark {MARK}.\n"]
    parts.append(READING)
    for section in dict.fromkeys(claim.section for claim in claims):
        own = [claim for claim in claims if claim.section == section]
        parts.append(f"## {section}\n\n{claims_table(own)}\n\n")
    return "".join(parts).rstrip() + "\n"


PAGES = (Page("claims.md", {}, rewrite=make_page),)
