"""The tables of docs/serving-speed.md: decoding, the engine, and the parts of a request's time."""

import re
from collections.abc import Callable, Sequence

from jaxstack.models import count_parameters
from jaxstack.models.config import preset_config
from scripts.pages.page import Page
from scripts.pages.page import spaced_table as table
from scripts.pages.rows import RATE, RESULTS, Row, read_all, read_rows

_OVERVIEW = "its documentation, performance overview"
PUBLISHED = (
    ("8B in FP8, prompts and answers of 1,000 tokens", "one H200", "TensorRT-LLM 1.0", "17,744", _OVERVIEW),
    ("8B in FP8, prompts and answers of 2,048 tokens", "one H200", "TensorRT-LLM 1.0", "12,194", _OVERVIEW),
    ("8B in bfloat16, 1,000 ShareGPT prompts", "one H100", "SGLang", "16,215", "AIMultiple"),
    ("8B in bfloat16, 1,000 ShareGPT prompts", "one H100", "vLLM", "12,553", "AIMultiple"),
    ("8B in bfloat16, one text at a time", "one A100", "gpt-fast", "93.9", "its README"),
    ("8B in int8, one text at a time", "one A100", "gpt-fast", "137.6", "its README"),
)
"""Published figures as their sources report them: work, machine, engine, tokens/s, source."""
_READ_SPEED = 4.3e12
"""Bytes/s at which the memory of an H200 was measured to be read."""
_THROUGHPUT = re.compile(r"serve (\S+) throughput prompt (\d+) tokens (\d+) slots \d+ bfloat16")
_BESIDE = re.compile(r"serve (\S+) (latency|throughput) prompt (\d+) tokens (\d+) slots \d+ (\S+(?: cache \S+)?)")
_FILLED = re.compile(r"generate qwen3-next-8l(-attention)? batch (\d+) prompt (\d+) \w+: steps, filled")
_DECODING = re.compile(r"generate (\S+) batch (\d+) prompt (\d+) \w+: steps")


def provenance(row: Row) -> str:
    """Return where and when a row was measured."""
    return f"{row['device']}, {row['date'][:10]}, commit {row['commit'][:7]}, `{row['command']}`."


def decoding() -> str:
    """Return the speed of decoding beside compiled PyTorch, from the newest run that measured both."""
    rows = [row for row in read_all(RESULTS / "generate.jsonl") if _DECODING.fullmatch(row["work"])]
    newest = max(row["run"] for row in rows if row["implementation"] != "jaxstack")
    run = [row for row in rows if row["run"] == newest]
    lines = []
    for work in dict.fromkeys(row["work"] for row in run):
        name, batch, prompt = _DECODING.fullmatch(work).groups()  # pyright: ignore[reportOptionalMemberAccess]
        ours = next(row for row in run if row["work"] == work and row["implementation"] == "jaxstack")
        peer = next(row for row in run if row["work"] == work and row["implementation"] != "jaxstack")
        speeds = [row["tokens_per_second_per_device"] for row in (ours, peer)]
        lines.append([f"{name}, {batch} x {prompt}", f"{speeds[0]:,.0f}", f"{100 * ours['share']:.1f} %",
                      f"{speeds[1]:,.0f}", f"{speeds[0] / speeds[1]:.2f}"])  # fmt: skip
    titles = ["model, texts x prompt", "tokens/s", "of the memory's bandwidth", "compiled PyTorch", "ratio"]
    return f"{table(titles, lines)}\n\n{provenance(run[0])}"


def hybrids() -> str:
    """Return steps of a hybrid and of a Transformer of its size, of the newest commit at which both were measured."""
    rows = [row for row in read_all(RESULTS / "generate.jsonl") if _FILLED.fullmatch(row["work"])]
    found = dict[tuple[int, int, str], dict[bool, Row]]()
    for row in sorted(rows, key=lambda row: row["date"]):
        attention, batch, tokens = _FILLED.fullmatch(row["work"]).groups()  # pyright: ignore[reportOptionalMemberAccess]
        found.setdefault((int(tokens), int(batch), row["commit"][:7]), {})[attention is not None] = row
    newest = {key[:2]: (both[False], both[True], key[2]) for key, both in found.items() if len(both) == 2}
    lines = []
    for (tokens, batch), (hybrid, attention, commit) in sorted(newest.items()):
        times = [row["milliseconds"] for row in (hybrid, attention)]
        lines.append(
            [f"{batch} x {tokens:,}", *(f"{time:.2f}" for time in times), f"{times[1] / times[0]:.2f}", commit]
        )
    titles = ["texts x tokens in the cache", "hybrid, ms", "Transformer, ms", "times as fast", "commit"]
    return f"{table(titles, lines)}\n\n{', '.join(dict.fromkeys(row['device'] for row in rows))}."


def engine() -> str:
    """Return the newest rows of the engine's benchmark.

    The variants of a work are compared with each other, so they come from its newest run. Only those of throughput
    stand by themselves.
    """
    lines = []
    rows = [row for row in read_rows(RESULTS / "serve.jsonl") if row["implementation"] == "jaxstack"]
    rows = [row for row in rows if " latency " not in row["work"]]
    newest = {row["work"]: row["run"] for row in sorted(rows, key=lambda row: row["date"])}
    rows = [row for row in rows if row["run"] == newest[row["work"]] or "throughput" in row["work"]]
    for row in rows:
        ratios = (("times_sequential", "{:.1f}x one at a time"), ("times_alone", "{:.2f}x alone"),
                  ("times_without", "{:.2f}x without"), ("first_answer_seconds", "first answer after {:.1f} s"),
                  ("all_programs_seconds", "all programs after {:.1f} s"),
                  ("share_of_optimum", "{:.1%} of the optimum in bfloat16"))  # fmt: skip
        compared = ", ".join(form.format(row[name]) for name, form in ratios if name in row)
        speed = row.get("tokens_per_second_per_device")
        time = row.get("milliseconds")
        lines.append([row["work"].removeprefix("serve "), row["variant"], f"{speed:,.0f}" if speed else "",
                      f"{time:.2f}" if time else "", compared, row["commit"][:7]])  # fmt: skip
    titles = ["work", "variant", "tokens/s", "ms", "compared", "commit"]
    return f"{table(titles, lines)}\n\n{', '.join(dict.fromkeys(row['device'] for row in rows))}."


def beside_vllm() -> str:
    """Return the newest measurement of each work of the engine beside vLLM, with vLLM's of the same run."""
    rows = [row for row in read_all(RESULTS / "serve.jsonl") if _BESIDE.fullmatch(row["work"]) and RATE in row]
    ours = {(row["run"], row["work"], row["variant"]): row for row in rows if row["implementation"] == "jaxstack"}
    whole = {(row["run"], row["work"]): row for row in rows if "share_of_optimum" in row}
    pairs = dict[tuple[str, ...], tuple[Row, Row]]()
    for peer in (row for row in rows if row["implementation"].startswith("vllm")):
        name, kind, *sizes, dtype = _BESIDE.fullmatch(peer["work"]).groups()  # pyright: ignore[reportOptionalMemberAccess]
        found = ours.get((peer["run"], peer["work"], peer["variant"])) or whole.get((peer["run"], peer["work"]))
        if found is not None:
            pairs[name, dtype, kind, *sizes, peer["variant"]] = found, peer
    if not pairs:
        return "Not measured."
    lines = list[list[str]]()
    for (name, dtype, kind, prompt, tokens, variant), (row, peer) in sorted(pairs.items(), key=_by_number):
        work = f"{name} in {dtype}, {variant}"
        if kind == "latency":
            for key, words in (("first_token_milliseconds", "first tokens"), ("milliseconds_per_step", "a step")):
                lines.append([f"{work}, prompts of {prompt}: {words}", f"{row[key]:.2f} ms", f"{peer[key]:.2f} ms",
                              f"{peer[key] / row[key]:.2f}", row["commit"][:7]])  # fmt: skip
        else:
            lines.append([f"{work}, {prompt} + {tokens} tokens: answers' tokens/s", f"{row[RATE]:,.0f}",
                          f"{peer[RATE]:,.0f}", f"{row[RATE] / peer[RATE]:.2f}", row["commit"][:7]])  # fmt: skip
    titles = ["work", "jaxstack", "vLLM", "times as fast", "commit"]
    sources = dict.fromkeys(f"{peer['implementation']}, {provenance(row)}" for row, peer in pairs.values())
    return f"{table(titles, lines)}\n\n" + "\n\n".join(sources)


def _by_number(pair: tuple[tuple[str, ...], object]) -> tuple[object, ...]:
    """Return the key by which measurements beside vLLM are sorted: numbers of prompts by their value."""
    *names, variant = pair[0]
    return (*names, int(variant.split()[0]))


def optimum() -> str:
    """Return the share of the optimum in the newest run of each work, and what limits a decoding step of llama3-8b."""
    rows = [row for row in read_all(RESULTS / "serve.jsonl") if _THROUGHPUT.fullmatch(row["work"])]
    # A work names its slots too; of those with the same prompts and answers the newest counts.
    wholes = {_THROUGHPUT.fullmatch(row["work"]).groups(): row  # pyright: ignore[reportOptionalMemberAccess]
              for row in rows if "share_of_optimum" in row}  # fmt: skip
    gemms = [row for row in read_all(RESULTS / "device.jsonl") if row["work"].startswith("gemm bf16")]
    lines = []
    for (name, prompt, tokens), row in wholes.items():
        sustained = max(gemm["tflops_per_device"] for gemm in gemms if gemm["device"] == row["device"])
        share = row["share_of_optimum"] * row["peak_tflops"] / sustained
        speed = row[RATE] * (int(prompt) + int(tokens)) / int(tokens)
        lines.append([f"{name}, {prompt} + {tokens}", f"{speed:,.0f}", f"{row['share_of_optimum']:.0%}", f"{share:.0%}",
                      f"{share_in_turn(name, int(prompt), int(tokens), 1e12 * sustained):.0%}",
                      row["commit"][:7]])  # fmt: skip
    titles = ["model, prompt + answer", "tokens/s, prompts included", "of the optimum at the data sheet's peak",
              "of the optimum at the measured matmul rate", "largest share without overlap",
              "commit"]  # fmt: skip
    newest = [row["run"] for row in rows if row["variant"].startswith("program: decode of empty")][-1]
    run = {row["variant"].split(",")[0]: row for row in rows if row["run"] == newest}
    decode, empty = (run[f"program: decode{words}"]["milliseconds"] for words in ("", " of empty sequences"))
    return (
        f"{table(titles, lines)}\n\nA decoding step of {run['program: decode']['work'].split()[1]} took "
        f"{decode:.1f} ms, but {empty:.1f} ms without keys and values to read. For the largest share without overlap "
        f"the cache is read at {_READ_SPEED / 1e12:.1f} TB/s.\n\n"
        f"{provenance(run['program: decode'])}"
    )


def share_in_turn(name: str, prompt: int, tokens: int, flops: float) -> float:
    """Return the share of the optimum that is possible if matmuls and reading of the cache never overlap.

    Args:
      name: preset of the model, in bfloat16.
      prompt, tokens: tokens of each prompt and of each answer.
      flops: FLOP/s of the matmuls, for this share and for the optimum.
    """
    model = preset_config(name)
    assert model.vocab_size is not None
    weights = count_parameters(model).matmul
    heads = model.num_kv_heads or model.num_heads
    # The optimum multiplies each token with all matrices, but prompts need no logits. Each token of an answer reads the
    # keys and values, of two bytes each, of all tokens before it.
    computed = 2 * (weights * (prompt + tokens) - prompt * model.vocab_size * model.hidden_size)
    width = model.head_dim or model.hidden_size // model.num_heads
    cache = 2 * 2 * model.num_layers * heads * width * tokens * (prompt + tokens / 2)
    return 2 * weights * (prompt + tokens) / (computed + cache / _READ_SPEED * flops)


def paged_attention() -> str:
    """Return the paged attention kernel's newest times, and their share of the memory's bandwidth."""
    rows = [row for row in read_rows(RESULTS / "paged_attention.jsonl") if "as chosen" in row["variant"]]
    lines = [
        [
            row["work"].removeprefix("paged attention "),
            f"{1e3 * row['milliseconds']:.1f}",
            f"{row['bandwidth']:,.0f}",
            f"{row['share']:.0%}" if "share" in row else "-",
            row["device"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3"),
            row["commit"][:7],
        ]
        for row in rows
    ]
    return table(
        ["model, texts x tokens", "microseconds", "GB/s", "of the memory's bandwidth", "device", "commit"], lines
    )


def host_gather() -> str:
    """Return the newest times of gathering rows of a host table, by the GPU and by the CPU."""
    rows = read_rows(RESULTS / "host_gather.jsonl")
    lines = list[list[str]]()
    for work in dict.fromkeys(row["work"] for row in rows):
        ways = {row["implementation"]: row for row in rows if row["work"] == work}
        names = ("kernel", "call", "torch", "numpy")
        times = [f"{ways[name]['milliseconds']:.2f}" if name in ways else "" for name in names]
        kernel = ways["kernel"]
        lines.append([work.removeprefix("host gather "), *times, f"{kernel['gigabytes_per_second']:.1f}",
                      f"{kernel['speedup']:.2f}", kernel["commit"][:7]])  # fmt: skip
    titles = [
        "rows",
        "GPU, ms",
        "any call, ms",
        "PyTorch, ms",
        "NumPy, ms",
        "GB/s of the GPU",
        "times the faster",
        "commit",
    ]
    shown = f"{rows[0]['device']}, {rows[0]['cpu_cores']} CPU cores"
    return f"{table(titles, lines)}\n\n{shown}."


def speculation() -> str:
    """Return the speed and acceptance of speculative decoding, from the newest run."""
    rows = read_all(RESULTS / "speculation.jsonl")
    run = [row for row in rows if row["run"] == rows[-1]["run"]]
    lines = list[list[str]]()
    for row in sorted(run, key=lambda row: row["at_once"]):
        steps = row["tokens_per_step"]
        accepted = row["acceptance"]
        name = row.get("drafts", row["variant"])  # The variant of later rows names the number of requests too.
        lines.append([name, str(row["at_once"]), f"{row[RATE]:,.0f}", f"{row['times_without']:.2f}",
                      "" if accepted is None else f"{accepted:.0%}", "" if steps is None else f"{steps:.2f}",
                      f"{row['same_text']:.0%}"])  # fmt: skip
    titles = ["drafts by", "requests at once", "tokens/s", "times the speed without", "drafts accepted",
              "tokens per step", "equal answers"]  # fmt: skip
    _, model, _, draft, _, prompt, _, tokens, dtype = run[0]["work"].split()
    about = f"Parameters in matmuls: {model}, of the draft model {draft}; {dtype}; "
    about += f"prompts of {prompt} tokens, answers of {tokens}"
    return f"{table(titles, lines)}\n\n{about}. {provenance(run[0])}{_layers_together(rows, run)}"


def _layers_together(rows: list[Row], run: list[Row]) -> str:
    """Return a paragraph on the newest steps whose draft model ran layers together, if they are of another run."""
    found = [row for row in rows if "layers together, 1 at once" in row["variant"]]
    if not found or found[-1]["run"] == run[0]["run"]:
        return ""
    row = found[-1]
    others = {other["variant"]: other for other in rows if other["run"] == row["run"]}
    plain = others.get("draft model, 4 drafts, 1 at once")
    beside = f", and {plain['times_without']:.2f} with its layers in order" if plain else ""
    return (
        "\n\nTwo layers of the draft model together (EasySpec, which reaches 4.17 times) were measured in an earlier "
        f"run: {row['times_without']:.2f} times the speed without drafts{beside}, with one request. {provenance(row)}"
    )


def layer_window() -> str:
    """Return memory and speed of generation with a few layers in memory, or several devices, beside the whole model."""
    rows = read_rows(RESULTS / "layer_window.jsonl")
    tables = list[str]()
    for devices in sorted({row["devices"] for row in rows}):
        newest = max((row for row in rows if row["devices"] == devices), key=lambda row: row["date"])["run"]
        tables.append(_layer_window_table([row for row in rows if row["run"] == newest]))
    return "\n\n".join(tables)


def _layer_window_table(run: Sequence[Row]) -> str:
    lines = list[list[str]]()
    for row in run:
        bound = row.get("bound_bytes")
        others = row["variant"] != "whole"
        lines.append([row["variant"], f"{row['peak_live_bytes'] / 1e6:,.1f}", f"{bound / 1e6:,.1f}" if bound else "",
                      f"{row['less']:.1%}" if others else "", f"{row['resident_megabytes']:,.0f}",
                      f"{row['less_resident']:.1%}" if others else "", f"{row['milliseconds']:,.0f}",
                      "yes" if row["same_text"] else "no"])  # fmt: skip
    titles = ["layers in memory", "live arrays at most, MB", "these layers, cache and input of a layer, MB", "saved",
              "growth of the process, MB", "saved", "ms per token", "same text"]  # fmt: skip
    if run[0]["devices"] > 1:
        titles[0] = "layers in memory, or stages"
        titles[1] = "live arrays at most on the first device, MB"
    _, _, parameters, _, layers, _, _, prompt, dtype, *batch = run[0]["work"].split()
    about = f"{parameters} parameters in {layers} layers, {' '.join(['prompt of', prompt, 'tokens,', dtype, *batch])}"
    return f"{table(titles, lines)}\n\n{about}. {run[0]['cpu_cores']} cores; {provenance(run[0])}"


def published() -> str:
    """Return published figures of other engines."""
    return table(["work", "machine", "engine", "tokens/s", "source"], PUBLISHED)


PARTS: dict[str, Callable[[], str]] = {
    "decoding": decoding,
    "paged attention": paged_attention,
    "hybrids": hybrids,
    "engine": engine,
    "vllm": beside_vllm,
    "optimum": optimum,
    "speculation": speculation,
    "layer window": layer_window,
    "host gather": host_gather,
    "published": published,
}
"""Name of a part of the page -> the function that makes it."""

PAGES = (Page("serving-speed.md", PARTS),)
