"""Each recipe of jaxstack on a model trained on real text: bytes, held-out loss, two tasks, and decoding speed.

    python benchmarks/compression/compressed_models.py                      # 124M; about eight minutes on an H200
    python benchmarks/compression/compressed_models.py --size 350m --tokens 50e6
    python benchmarks/compression/compressed_models.py --recipes int8 fp8   # only these; bfloat16 is always measured
    python benchmarks/compression/compressed_models.py --tiny               # tiny sizes on a CPU; rows go to tiny/

A model of Llama's shape trains on the source code of the installed packages and, a tenth of its rows, on sums of
numbers; a run that was trained before with the same settings is taken from `--folder`. Each recipe then runs in a
process of its own, `--together` of them at a time, which take turns when they measure speed. Its row is appended to
benchmarks/results/compressed_models.jsonl as soon as it ends. A recipe may take `--limit` seconds from one sign of
progress to the next: a layer that is compressed, the loss, the tasks, a compiled number of rows, the speed; one that
exceeds them keeps the fields that it has measured (`failed`).

    bytes      of all parameters as stored; `smaller`: bfloat16's over them
    loss       held-out, of source code, in nats a token; `rise`: minus bfloat16's
    cloze      share of names in held-out source code that greedy decoding writes right; each occurred before
    sums       share of sums of two numbers of up to three digits that it writes right; none was trained on
    ms, speed  milliseconds of a decoding step at 1, 16 and 64 rows, by `Decoder.generate`; bfloat16's over them

`--export` also writes each model for vLLM into `--folder`/exports, with the log-probabilities of a held-out text that
`vllm_reads.py --exports` compares with vLLM's. A folder with text and a run of other settings is
refused.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.compression.code_and_sums import CODE, HELD_OUT, SUMS, read_questions, write_work
from benchmarks.compression.vllm_reads import EXPECTED, log_probabilities
from benchmarks.reports import events, report
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from benchmarks.steps import run_as_command
from benchmarks.turns import Turn, place, run_together, turns
from jaxstack.distributed.parent_death import die_with_parent

SCRIPT = "compressed_models"
EXPECTED_TOKENS = 128
"""Tokens of the held-out text whose log-probabilities are written with an export."""
BASE = "bfloat16"
RECIPES = (
    BASE, "int8", "w8a8", "int4-gptq", "int4-awq", "fp8", "fp8-dynamic", "bfp8", "nf4", "mxfp4", "2of4", "sparse50",
    "lowrank", "cluster3", "bct",
)  # fmt: skip
KEEP = "layers: [{path: ., method: keep}]\n"
"""The recipe of `bfloat16`."""
FORMATS = {
    "int4-gptq": "pack-quantized",
    "int4-awq": "pack-quantized",
    "w8a8": "int-quantized",
    "fp8": "float-quantized",
    "fp8-dynamic": "float-quantized",
}
"""Format of an export for vLLM; the others are `dense`."""
COLUMNS = ("variant", "megabytes", "smaller", "loss", "rise", "cloze", "sums", "ms", "speed", "seconds", "failed")

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model, of its training, and of what is asked.

    Attributes:
        model: overrides of the configuration that choose the model.
        training: those that choose the training.
        tokens_a_step: tokens of a step.
        questions: number of each kind.
        sums: documents of sums to train on.
        eval_tokens: held-out tokens of a loss.
        sequences: sequences of calibration.
        rows: of decoding.
        prompt, answer: tokens of each row.
    """

    model: tuple[str, ...]
    training: tuple[str, ...] = (
        "train.global_batch_size=64", "train.sequence_length=1024", "optimizer.learning_rate=1.0e-3",
        "optimizer.weight_decay=0.1", "optimizer.b2=0.95", "data.tokenizer.vocab_size=32768",
    )  # fmt: skip
    tokens_a_step: int = 65536
    questions: int = 1000
    sums: int = 30_000
    eval_tokens: int = 2**19
    sequences: int = 128
    rows: tuple[int, ...] = (1, 16, 64)
    prompt: int = 256
    answer: int = 128


def llama_shape(layers: int, hidden: int, intermediate: int, heads: int) -> tuple[str, ...]:
    """Return overrides of a model of Llama's shape with tied embeddings."""
    shape = {"num_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate, "num_heads": heads}
    fixed = {"num_kv_heads": heads, "vocab_size": 32768, "tie_word_embeddings": "true", "scan_layers": "false"}
    return tuple(f"model.{key}={value}" for key, value in {**shape, **fixed}.items())


SIZES = {
    "124m": Size(llama_shape(12, 768, 2560, 12)),
    "350m": Size(llama_shape(24, 1024, 2944, 16)),
    "tiny": Size(
        ("model.num_layers=2", "model.hidden_size=128", "model.intermediate_size=256", "model.num_heads=4",
         "model.num_kv_heads=4", "model.vocab_size=512", "model.tie_word_embeddings=true", "model.scan_layers=false"),
        ("train.global_batch_size=4", "train.sequence_length=64", "optimizer.learning_rate=3.0e-3",
         "data.tokenizer.vocab_size=512"),
        256, 16, 50, 2**10, 8, (1, 2), 8, 10,
    ),
}  # fmt: skip


def check_folder(folder: Path, settings: Mapping[str, Any]) -> None:
    """Note the settings of text and run in a new folder; refuse a folder that has those of other settings."""
    known = folder / "settings.json"
    found = json.loads(known.read_text(encoding="utf-8")) if known.exists() else None
    if found != settings and (found is not None or (folder / "run").exists()):
        print(
            f"{folder} holds the text and run of {found or 'unknown settings'}, and this measurement has "
            f"{dict(settings)}: give these, or another --folder.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    known.write_text(json.dumps(settings), encoding="utf-8")


def train(folder: Path, size: Size, tokens: float, limit: float) -> float:
    """Train the model in a process of its own, unless the folder has it; return the seconds that it took.

    A run that exceeds `limit` seconds saves, and stops there.
    """
    known = folder / "train_seconds"
    if known.exists():
        return float(known.read_text(encoding="utf-8"))
    steps = max(4, round(tokens / size.tokens_a_step))
    sources = f"data.sources=[{{path: {folder / CODE}, weight: 0.9}}, {{path: {folder / SUMS}, weight: 0.1}}]"
    config = folder / "config.yaml"
    config.write_text(f"run: {{name: run, dir: {folder}}}\n", encoding="utf-8")
    command = [
        sys.executable, "-m", "jaxstack.train", "--config", str(config), *size.model, *size.training,
        sources, f"data.held_out=[{{path: {folder / HELD_OUT}}}]", f"data.cache_dir={folder / 'cache'}",
        "data.packing=false", f"train.steps={steps}", f"schedule.warmup_steps={max(1, steps // 20)}",
        f"train.eval_tokens={size.eval_tokens}", f"checkpoint.every_steps={steps}",
        f"observe.log_every={max(1, steps // 20)}",
    ]  # fmt: skip
    began = time.perf_counter()
    with subprocess.Popen(command, preexec_fn=die_with_parent) as process:
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"training reached {limit:.0f} s and stops", flush=True)
            process.send_signal(signal.SIGTERM)
    if process.returncode not in (0, 128 + signal.SIGTERM):
        raise SystemExit(f"training ended with {process.returncode}")
    seconds = time.perf_counter() - began
    known.write_text(f"{seconds}\n", encoding="utf-8")
    return seconds


def measure(folder: Path, recipe: str, size: Size, exported: str | None) -> None:
    """Compress the run of a folder and measure the result in this process; report fields as soon as they are known.

    Args:
      folder: text and run.
      recipe: name or file of the recipe, or `BASE`.
      size: of the model.
      exported: name of the model, under which it is exported for vLLM; None: it is not.
    """
    turn = Turn()
    import jax

    from jaxstack.compress.after_training.run import CompressOptions, compress
    from jaxstack.compress.config import load_recipe
    from jaxstack.distributed.device_setup import cache_compilations
    from jaxstack.run.evaluate import TextOptions
    from jaxstack.run.load import load

    cache_compilations()
    kept = folder / "keep.yaml"
    kept.write_text(KEEP, encoding="utf-8")
    rules = load_recipe(str(kept) if recipe == BASE else recipe, [f"calibration.sequences={size.sequences}"])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        out = Path(place) / "model"
        options = CompressOptions(text=TextOptions(max_tokens=size.eval_tokens), layer_tokens=0)
        found = compress(folder / "run", rules, out, options, lambda line: print(line, flush=True))
        assert found.loss_after is not None
        report(device=jax.devices()[0].device_kind, bytes=found.bytes_after, loss=found.loss_after.loss,
               eval_tokens=found.loss_after.tokens, steps=found.step,
               compress_seconds=time.perf_counter() - began)  # fmt: skip
        run = load(out, report=lambda line: print(line, file=sys.stderr))
        report(**{kind: answered(run, asked) for kind, asked in read_questions(folder).items()})
        if exported is not None:
            write_export(out, folder / "exports" / recipe, FORMATS.get(recipe, "dense"))
            text = json.loads((folder / HELD_OUT).read_text(encoding="utf-8").splitlines()[0])["text"][:2000]
            write_expected(folder / "exports" / recipe, exported, run, text)
        run.decoder.join_projections()
        report(**decoding_speed(run.decoder, size, turn))


def answered(run: Any, questions: list[Any]) -> float:
    """Return the share of questions that greedy decoding answers right."""
    from jaxstack.decoding.decode import Scorer

    start = run.tokenizer.document_start
    contexts = run.tokenizer.encode_documents([question.context for question in questions])
    answers = run.tokenizer.encode_documents([question.answer for question in questions])
    longest = run.config.model.max_position_embeddings or run.config.train.sequence_length
    rows = []
    for context, answer in zip(contexts, answers, strict=True):
        kept = [start, *context.tolist()[-(longest - len(answer) - 1) :]]
        rows.append((kept + answer.tolist(), len(kept)))
    scores = Scorer(run.decoder, 64).score(rows)
    return sum(score.is_greedy for score in scores) / len(scores)


def decoding_speed(decoder: Any, size: Size, turn: Turn) -> Row:
    """Return milliseconds of a decoding step for each number of rows, and the backends of packed products."""
    from benchmarks.serving.generate import measure as measure_decoding
    from jaxstack.decoding.sampling import Sampling
    from pallas_kernels import record_choices

    with record_choices() as choices:
        for rows in size.rows:  # compiles while others use the GPU
            print(f"compiling decoding of {rows} rows", flush=True)
            list(decoder.generate([[1] * size.prompt] * rows, size.answer, Sampling(temperature=0.0)))
    turn.wait(lambda: print("waiting for the other recipes", flush=True))
    found = {rows: 1e3 * measure_decoding(decoder, rows, size.prompt, size.answer)[1] for rows in size.rows}
    backends = sorted({choice.backend for choice in choices if choice.operation == "packed_matmul"})
    return {"milliseconds_by_rows": found, "backends": backends}


def write_export(model: Path, output: Path, form: str) -> None:
    """Write a checkpoint that vLLM reads."""
    from jaxstack.run.convert import export_checkpoint

    shutil.rmtree(output, ignore_errors=True)
    export_checkpoint(model, output, dtype="bfloat16", format=form, model_type="llama", warn=lambda line: None)


def write_expected(export: Path, name: str, run: Any, text: str) -> None:
    """Write into an export what `vllm_reads.py --exports` compares: tokens of a text, and their log-probabilities."""
    ids = run.tokenizer.encode_documents([text])[0].tolist()[:EXPECTED_TOKENS]
    found = {"work": f"export of {name}", "tokens": ids, "log_probabilities": log_probabilities(run.decoder, ids)}
    (export / EXPECTED).write_text(json.dumps(found), encoding="utf-8")


def recipe_row(command: list[str], recipe: str, limit: float, environment: Mapping[str, str]) -> Row:
    """Run the process of a recipe; return its fields, with `failed` if it broke off or hung for `limit` seconds."""
    row: Row = {"variant": recipe, "implementation": "jaxstack"}
    began = time.perf_counter()
    for event in events([*command, "--worker", recipe], limit, environment):
        row |= event
        print(f"{recipe}, {time.perf_counter() - began:.0f} s: {event}", flush=True)
    return row | {"seconds": time.perf_counter() - began}


def compare(row: Row, base: Row) -> None:
    """Add what a row is beside bfloat16's: how much smaller, the rise of the loss, and the speed at each row count."""
    if "bytes" in row and "bytes" in base:
        row |= {"smaller": base["bytes"] / row["bytes"], "rise": row["loss"] - base["loss"]}
    if "bytes" in row:
        row["megabytes"] = row["bytes"] / 1e6
    ours = row.get("milliseconds_by_rows", {})
    theirs = base.get("milliseconds_by_rows", {})
    row["ms"] = ", ".join(f"{value:.3f}" for value in ours.values())
    row["speedup_by_rows"] = {rows: theirs[rows] / value for rows, value in ours.items() if rows in theirs}
    row["speed"] = ", ".join(f"{value:.2f}" for value in row["speedup_by_rows"].values()) or "not measured"


def rows_of(recipes: list[str], command: list[str], limit: float, together: int) -> Iterator[Row]:
    """Yield the row of each recipe as soon as it is known; that of bfloat16, which measures first, is the base."""
    base: Row = {}
    for start in range(0, len(recipes), together):
        with turns() as environment:
            calls = [
                partial(recipe_row, command, recipe, limit, {**environment, **place(number)})
                for number, recipe in enumerate(recipes[start : start + together])
            ]
            for _, row in run_together(calls):
                base = row if row["variant"] == BASE else base
                compare(row, base)
                yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("124m", "350m"), default="124m", help="model (default: %(default)s)")
    parser.add_argument("--tokens", type=positive(float), default=75e6, help="of the training (default: 75e6)")
    parser.add_argument("--megabytes", type=positive(float), default=350, help="source code to train on (350)")
    parser.add_argument("--train-limit", type=positive(float), default=270, help="seconds of training (270)")
    parser.add_argument("--limit", type=positive(float), default=120, help="seconds without progress (120)")
    parser.add_argument("--together", type=positive(int), default=6, help="recipes that run at the same time (6)")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME|FILE", help="recipes (all)")
    parser.add_argument("--folder", type=Path, help="directory of text and run, kept (default: a temporary one)")
    parser.add_argument("--export", action="store_true", help="write models for vLLM into --folder")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU; rows go to tiny/")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    name = "tiny" if args.tiny else args.size
    size = SIZES[name]
    exported = f"llama {name}" if args.export else None
    if args.worker:
        run_as_command(f"{SCRIPT}.py", lambda: measure(args.folder, args.worker, size, exported))
    script = SCRATCH + SCRIPT if args.tiny else SCRIPT
    require_commit(script)
    tokens, megabytes = (40 * size.tokens_a_step, 1) if args.tiny else (args.tokens, args.megabytes)
    with tempfile.TemporaryDirectory(prefix="compressed-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder, {"size": name, "tokens": tokens, "megabytes": megabytes})
        if not (folder / "run").exists():
            write_work(folder, megabytes, size.questions, size.sums)
        seconds = train(folder, size, tokens, args.train_limit)
        command = [sys.executable, __file__, "--folder", str(folder), "--size", args.size]
        command += ["--tiny"] * args.tiny + ["--export"] * args.export
        rows = []
        for row in rows_of([BASE, *(r for r in args.recipes if r != BASE)], command, args.limit, args.together):
            row |= {"work": f"llama {name}, {tokens:.3g} tokens of code and sums", "train_seconds": seconds}
            append_rows(script, [row])
            rows.append(row)
    print_table(rows, COLUMNS)
    return int(all("failed" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
