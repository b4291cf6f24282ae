"""Makes the tables of docs/compression.md from benchmarks/results/compression_methods.jsonl.

python benchmarks/compression_methods.py && python scripts/compression_page.py
"""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.page_parts import fill_page
from scripts.result_rows import RESULTS, ROOT, Row, read_rows

PAGE = ROOT / "docs" / "compression.md"
NAMES = {"magnitude": "magnitude", "wanda": "Wanda", "sparsegpt": "SparseGPT", "rtn": "rounding", "awq": "AWQ",
         "gptq": "GPTQ"}  # fmt: skip
PRUNING = ("magnitude", "wanda", "sparsegpt")
ROUNDING = ("rtn", "awq", "gptq")


def comparison(rows: Iterable[Row], methods: tuple[str, ...], key: str, form: str) -> str:
    """Return a table with a line for each setting and a column for each method.

    Args:
      rows: rows of one work.
      methods: implementations to show; settings without any of them are left out.
      key: the value to show.
      form: format of the value.
    """
    found = {(row["variant"], row["implementation"]): row[key] for row in rows if key in row}
    variants = list(dict.fromkeys(variant for variant, method in found if method in methods))
    lines = ["| | " + " | ".join(NAMES[method] for method in methods) + " |", "|---|" + "---|" * len(methods)]
    for variant in variants:
        cells = (format(found[variant, m], form) if (variant, m) in found else "–" for m in methods)
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def layer_tables(rows: Iterable[Row]) -> str:
    """Return the errors of the synthetic layer."""
    found = [row for row in rows if "output_error" in row]
    return "\n\n".join(comparison(found, methods, "output_error", ".4f") for methods in (PRUNING, ROUNDING))


def model_tables(rows: Iterable[Row]) -> str:
    """Return the perplexity of the trained model, and how much each method adds to it."""
    found = [row for row in rows if "perplexity_rise" in row]
    if not found:
        return "Not measured yet."
    first = found[0]
    about = (
        f"{first['work']}: perplexity {first['uncompressed_perplexity']:.2f} on held-out text, calibrated on "
        f"{first['sequences']} sequences. Added perplexity:"
    )
    found = [row for row in found if row["work"] == first["work"]]
    tables = (comparison(found, methods, "perplexity_rise", "+.3f") for methods in (PRUNING, ROUNDING))
    return "\n\n".join([about, *tables])


def time_table(rows: Iterable[Row]) -> str:
    """Return the times of GPTQ on whole models."""
    found = [row for row in rows if "weights" in row]
    if not found:
        return "Not measured yet; `python benchmarks/compression_methods.py --parts time` measures it."
    lines = ["| work | device | seconds | peak memory |", "|---|---|---|---|"]
    for row in found:
        memory = row["peak_memory_bytes"]
        shown = "–" if memory is None else f"{memory / 2**30:.1f} GiB"
        lines.append(f"| {row['work']} | {row['device']} | {row['seconds']:.0f} | {shown} |")
    return "\n".join(lines)


def products_table(_: Iterable[Row]) -> str:
    """Return the speed of products with packed weights relative to bfloat16's, by the kernel and by XLA."""
    rows = read_rows(RESULTS / "packed_products.jsonl")
    found = {(row["work"], row["variant"], row["implementation"]): row for row in rows}
    lines = [
        "| work | weight | bfloat16, µs | kernel, µs | speedup | GB/s | XLA's speedup |",
        "|---|---|---|---|---|---|---|",
    ]
    for (work, variant, implementation), row in found.items():
        if implementation != "triton":
            continue
        plain = found[work, "bf16", "xla"]
        xla = found.get((work, variant, "xla"))
        times = (1e3 * timed["milliseconds"] / row["pairs"] for timed in (plain, row))
        cells = (work, variant, *(f"{time:.1f}" for time in times), f"{row['speedup']:.2f}")
        beside = f"{xla['speedup']:.2f}" if xla else "–"
        lines.append(f"| {' | '.join(cells)} | {row['bandwidth']:,.0f} | {beside} |")
    return "\n".join([*lines, "", _source(rows)])


def decode_table(_: Iterable[Row]) -> str:
    """Return the time of a decoding step of a whole model with packed weights, beside bfloat16's."""
    rows = read_rows(RESULTS / "packed_decode.jsonl")
    lines = ["| work | weights | ms a step | speedup | bound by bytes | GB/s |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (row["work"], row["variant"], f"{row['milliseconds']:.2f}", f"{row['speedup']:.2f}")
        lines.append(f"| {' | '.join(cells)} | {row['bound']:.2f} | {row['gigabytes_per_second']:,.0f} |")
    return "\n".join([*lines, "", _source(rows)])


def _source(rows: list[Row]) -> str:
    runs = dict.fromkeys((row["commit"][:7], row["command"]) for row in rows)
    return f"{rows[0]['device']}; " + "; ".join(f"commit {commit}, `{command}`" for commit, command in runs) + "."


MADE: Mapping[str, Callable[[Iterable[Row]], str]] = {
    "layer": layer_tables,
    "model": model_tables,
    "time": time_table,
    "products": products_table,
    "decode": decode_table,
}
"""Name of a made part -> function of the rows."""


def make_page(page: str, rows: Iterable[Row], made: Mapping[str, Callable[[Iterable[Row]], str]] = MADE) -> str:
    """Return the page with its made parts replaced."""
    rows = list(rows)
    return fill_page(page, {part: functools.partial(make, rows) for part, make in made.items()})


if __name__ == "__main__":
    text = make_page(PAGE.read_text(encoding="utf-8"), read_rows(RESULTS / "compression_methods.jsonl"))
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
