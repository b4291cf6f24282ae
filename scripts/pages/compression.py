"""The tables of docs/compression.md: errors of the methods, their time, and the speed of packed weights."""

from collections.abc import Callable, Iterable

from scripts.pages.page import Page, table, table_of
from scripts.pages.rows import RESULTS, Row, read_all, read_rows

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
    lines = [
        [variant, *(format(found[variant, m], form) if (variant, m) in found else "–" for m in methods)]
        for variant in variants
    ]
    return table(["", *(NAMES[method] for method in methods)], lines)


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
        return "Not measured yet; `python benchmarks/compression/compression_methods.py --parts time` measures it."
    columns = {"work": "{work}", "device": "{device}", "seconds": "{seconds:.0f}", "peak memory": _memory}
    return table_of(columns, found)


def _memory(row: Row) -> str:
    found = row["peak_memory_bytes"]
    return "–" if found is None else f"{found / 2**30:.1f} GiB"


def products_table() -> str:
    """Return the speed of products with packed weights relative to bfloat16's, by the kernel and by XLA."""
    rows = read_rows(RESULTS / "packed_products.jsonl")
    found = {(row["work"], row["variant"], row["implementation"]): row for row in rows}
    lines = []
    for (work, variant, implementation), row in found.items():
        if implementation == "xla":
            continue
        plain = found[work, "bf16", "xla"]
        xla = found.get((work, variant, "xla"))
        times = (1e3 * timed["milliseconds"] / row["pairs"] for timed in (plain, row))
        cells = (work, variant, *(f"{time:.1f}" for time in times), f"{row['speedup']:.2f}")
        lines.append([*cells, f"{row['bandwidth']:,.0f}", f"{xla['speedup']:.2f}" if xla else "–"])
    titles = ["work", "weight", "bfloat16, µs", "kernel, µs", "speedup", "GB/s", "XLA's speedup"]
    return f"{table(titles, lines)}\n\n{_source(rows)}"


def decode_table() -> str:
    """Return the time of a decoding step of a whole model with packed weights."""
    rows = read_rows(RESULTS / "packed_decode.jsonl")
    columns = {"work": "{work}", "weights": "{variant}", "ms a step": "{milliseconds:.2f}", "speedup": "{speedup:.2f}",
               "bound by bytes": "{bound:.2f}", "GB/s": "{gigabytes_per_second:,.0f}"}  # fmt: skip
    return f"{table_of(columns, rows)}\n\n{_source(rows)}"


def models_table() -> str:
    """Return what each recipe makes of models that were trained on source code and sums."""
    path = RESULTS / "compressed_models.jsonl"
    recipes = [row for row in read_rows(path) if row["variant"] != "bfloat16"]
    if not recipes:
        return "Not measured yet."
    # Each is compared with bfloat16 in its own run, which trained a model of its own.
    bases = {row["run"]: row for row in read_all(path) if row["variant"] == "bfloat16"}
    runs = dict.fromkeys(row["run"] for row in recipes)
    rows = [row for run in runs for row in (bases[run], *(recipe for recipe in recipes if recipe["run"] == run))]

    def speeds(row: Row) -> str:
        return ", ".join(f"{value:.2f}" for value in row.get("speedup_by_rows", {}).values()) or "–"

    def value(name: str, form: str) -> Callable[[Row], str]:
        return lambda row: format(row[name], form) if row.get(name) is not None else "–"

    columns = {"work": "{work}", "recipe": "{variant}", "MB": value("megabytes", ".0f"),
               "smaller": value("smaller", ".2f"), "loss": value("loss", ".4f"), "rise": value("rise", "+.4f"),
               "cloze": value("cloze", ".1%"), "sums": value("sums", ".1%"),
               "speed at 1, 16, 64 rows": speeds}  # fmt: skip
    return f"{table_of(columns, rows)}\n\n{_source(rows)}"


def _source(rows: list[Row]) -> str:
    runs = dict.fromkeys((row["commit"][:7], row["command"]) for row in rows)
    return f"{rows[0]['device']}; " + "; ".join(f"commit {commit}, `{command}`" for commit, command in runs) + "."


def read_methods() -> list[Row]:
    """Return the newest rows of the methods."""
    return read_rows(RESULTS / "compression_methods.jsonl")


PARTS = {
    "layer": lambda: layer_tables(read_methods()),
    "model": lambda: model_tables(read_methods()),
    "time": lambda: time_table(read_methods()),
    "products": products_table,
    "decode": decode_table,
    "models": models_table,
}
PAGES = (Page("compression.md", PARTS),)
