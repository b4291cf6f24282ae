"""What vLLM computes from exported checkpoints: log-probabilities beside ours, of a Llama and a mixture of experts.

    python benchmarks/compression/vllm_reads.py --vllm /opt/vllm/bin/python  # four minutes on a GPU
    python benchmarks/compression/vllm_reads.py --formats pack-quantized --models qwen3_moe --vllm python
    python benchmarks/compression/vllm_reads.py --exports /tmp/m124 --vllm python  # of compressed_models.py --export
    python benchmarks/compression/vllm_reads.py --tiny                       # without vLLM, on a CPU; rows go to tiny/

A small model of each family trains for some steps, is compressed to the form of each format of compressed-tensors, and
exported. Ours are the log-probabilities of a held-out text under the compressed run, as its decoder computes them; the
other ones are those of vLLM under the export (`benchmarks/peers/vllm_scores.py`), and those of jaxstack, which reads
the export back. `difference` is the mean of the absolute differences over the tokens, `largest` the largest. Both
programs compute in bfloat16 on a GPU, in another order, so that they differ in the third digit. `failed` says why there
is no difference. With `--exports` the models are those of `compressed_models.py --export` in the folder, one for each
recipe. Rows are appended to benchmarks/results/vllm_reads.jsonl.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from benchmarks.steps import run_as_command
from jaxstack.distributed.parent_death import die_with_parent

SCRIPT = "vllm_reads"
EXPECTED = "expected.json"
"""File of an export with `work`, the ids `tokens` of a text, and our `log_probabilities` of all but the first."""
PEER = Path(__file__).resolve().parents[1] / "peers" / "vllm_scores.py"
SIZES = (
    "model.num_layers=2", "model.hidden_size=256", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=64",
    "model.intermediate_size=512", "model.vocab_size=1024", "model.scan_layers=false", "model.remat=none",
)  # fmt: skip
MODELS: dict[str, tuple[str, ...]] = {
    "llama": (),
    "qwen3_moe": (
        "model.preset=qwen3-30b-a3b", "model.moe.num_experts=8", "model.moe.num_experts_per_tok=2",
        "model.moe.moe_intermediate_size=256",
    ),
}  # fmt: skip
"""Hugging Face's name of the family -> what its configuration has beside `SIZES`."""
TRAINING = (
    "data.tokenizer={name: bpe, vocab_size: 1024}", "train.global_batch_size=16", "train.sequence_length=128",
    "optimizer.learning_rate=3.0e-3", "train.eval_every_steps=null", "observe.progress=false",
)  # fmt: skip
FORMATS: dict[str, str | None] = {
    "dense": None,
    "pack-quantized": "layers: [{path: ^decoder/, method: rtn, bits: 4, group_size: 128}]",
    "float-quantized": "layers: [{path: ^decoder/, method: fp8, activations: fp8}]",
    "int-quantized": "layers: [{path: ^decoder/, method: rtn, bits: 8, activations: int8}]",
}
"""Format of an export -> the recipe that makes a model for it; None: the model is exported as it is, in bfloat16."""
TEXT = "    def __init__(self, name, values=None):\n        self.name = name\n        self.values = values or []\n"
COLUMNS = ("work", "variant", "implementation", "mean", "ours", "difference", "largest", "failed")

Row = dict[str, Any]


def train(folder: Path, name: str, steps: int) -> Path:
    """Train a small model of a family; return its run directory."""
    from jaxstack import load_config
    from jaxstack import train as run

    sizes = [*MODELS[name], *SIZES, *TRAINING, f"train.steps={steps}", f"schedule.warmup_steps={steps // 10}"]
    run(load_config(None, [f"run.dir={folder}", f"run.name={name}", *sizes]))
    return folder / name


def compressed(run: Path, form: str) -> Path:
    """Return the run, compressed to what a format stores."""
    from jaxstack.compress.after_training.run import CompressOptions, compress

    recipe = FORMATS[form]
    if recipe is None:
        return run
    made = run.with_name(f"{run.name}-{form}")
    file = made.with_suffix(".yaml")
    file.write_text(recipe, encoding="utf-8")
    compress(run, str(file), made, CompressOptions(layer_tokens=0))
    return made


def log_probabilities(decoder: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-probabilities of ids[1:] under the model of a decoder, each token given those before it."""
    from jaxstack.decoding.decode import Scorer

    rows = [(list(ids[: place + 1]), place) for place in range(1, len(ids))]
    return [score.log_probability for score in Scorer(decoder, len(rows)).score(rows)]


def vllm_scores(python: str, ids: Sequence[int], folders: Sequence[Path], timeout: float) -> Iterator[Row]:
    """Yield what vLLM says of each checkpoint; if it ends early, the reason for those that are left."""
    with tempfile.TemporaryDirectory() as place:
        text = Path(place, "text.json")
        text.write_text(json.dumps(list(ids)), encoding="utf-8")
        said = Path(place, "said")
        with said.open("w") as file:
            command = [python, PEER, text, *folders]
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, preexec_fn=die_with_parent)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
    found = {one["folder"]: one for one in (json.loads(line) for line in lines if line.startswith('{"folder"'))}
    for folder in folders:
        yield found.get(str(folder), {"vllm": "", "failed": " | ".join(lines[-3:])[-500:] or "it said nothing"})


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Return the fields of a row: both means, and the differences."""
    apart = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    means = {"ours": sum(ours) / len(ours), "mean": sum(theirs) / len(theirs)}
    return {"tokens": len(ours), **means, "difference": sum(apart) / len(apart), "largest": max(apart)}


def measure(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Yield the rows of each family: of each format the export read back, then those of vLLM."""
    from jaxstack.run.convert import export_checkpoint
    from jaxstack.run.load import load

    for name in args.models:
        run = train(folder / "runs", name, args.steps)
        ids = load(run, report=said_nothing).tokenizer.encode_documents([TEXT])[0].tolist()[: args.tokens]
        expected: dict[Path, tuple[Row, list[float]]] = {}
        for form in args.formats:
            model = compressed(run, form)
            export = folder / "exports" / f"{name}-{form}"
            export_checkpoint(
                model, export, dtype="bfloat16", format=form, model_type=name, warn=lambda line: print(line, flush=True)
            )
            ours, read = (log_probabilities(load(one, report=said_nothing).decoder, ids) for one in (model, export))
            common = {"work": f"export of {name}", "variant": form, "device": device_kind()}
            expected[export] = common, ours
            yield {**common, "implementation": "jaxstack", **compare(ours, read)}
        if args.vllm is None:
            continue
        yield from vllm_rows(args, ids, expected)


def measure_exports(args: argparse.Namespace, device: str) -> Iterator[Row]:
    """Yield a row of vLLM for each export in the folders `args.exports`, see `EXPECTED`."""
    for folder in args.exports:
        files = sorted(folder.glob(f"exports/*/{EXPECTED}"))
        if not files:
            raise SystemExit(f"{folder} has no exports/*/{EXPECTED}; `compressed_models.py --export` writes them.")
        told = {file.parent: json.loads(file.read_text(encoding="utf-8")) for file in files}
        expected = {
            place: ({"work": one["work"], "variant": place.name, "device": device}, one["log_probabilities"])
            for place, one in told.items()
        }
        yield from vllm_rows(args, told[files[0].parent]["tokens"], expected)


def vllm_rows(
    args: argparse.Namespace, ids: Sequence[int], expected: Mapping[Path, tuple[Row, list[float]]]
) -> Iterator[Row]:
    """Yield what vLLM says of each checkpoint: `expected` has the fields of its row, and our log-probabilities."""
    scores = vllm_scores(args.vllm, ids, list(expected), args.timeout)
    for found, (common, ours) in zip(scores, expected.values(), strict=True):
        theirs = found.get("log_probabilities")
        values = {"failed": found["failed"]} if theirs is None else compare(ours, theirs)
        yield {**common, "implementation": f"vllm {found['vllm']}".strip(), **values}


def said_nothing(line: str) -> None:
    """Drop a line of a report."""


def device_kind() -> str:
    """Return the kind of the device."""
    import jax

    return jax.devices()[0].device_kind


def main() -> None:
    """Read the command line; measure, print and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM; left out: ours only")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="families (all)")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS, help="formats (all)")
    parser.add_argument(
        "--exports", nargs="+", type=Path, metavar="DIR", help="folders of compressed_models.py --export"
    )
    parser.add_argument("--steps", type=positive(int), default=100, help="of training (100)")
    parser.add_argument("--tokens", type=positive(int), default=64, help="of the text that is scored, at most (64)")
    parser.add_argument("--timeout", type=positive(float), default=400, help="seconds of vLLM for a family (400)")
    parser.add_argument("--tiny", action="store_true", help="few steps; rows go to tiny/")
    args = parser.parse_args()
    if args.exports and args.vllm is None:
        parser.error("--exports compares with vLLM; name a Python that has it with --vllm")
    script = SCRATCH + SCRIPT if args.tiny else SCRIPT
    require_commit(script)
    args.steps = 10 if args.tiny else args.steps
    rows: list[Row] = []

    def body() -> None:
        with tempfile.TemporaryDirectory(prefix="vllm-reads-") as folder:
            for row in measure_exports(args, device_kind()) if args.exports else measure(args, Path(folder)):
                rows.append(row)
                append_rows(script, [row])
        print_table(rows, COLUMNS)

    run_as_command(f"{SCRIPT}.py", body)


if __name__ == "__main__":
    main()
