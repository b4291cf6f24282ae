"""A step of reinforcement learning on one GPU, ours and TRL's in turn: samples/s, and the share of the rollout.

    python benchmarks/training/reinforce.py
    python benchmarks/training/reinforce.py --peers generate --set train.gradient_accumulation=16
    python benchmarks/training/reinforce.py --peers --exact  # what exact log-probabilities cost
    python benchmarks/training/reinforce.py --work llama3-8b-lora  # adapters of rank 16
    python benchmarks/training/reinforce.py --work llama3-1b-fsdp2  # two GPUs, both of which sample and train
    python benchmarks/training/reinforce.py --tiny  # a tiny model, on a CPU too

GRPO of a Llama with random weights (`--work`; llama3-1b by default): a step answers 32 prompts of 256 tokens with 8
samples of exactly 512 tokens, at the temperature 1, and takes one update with all of them, without a reference. No
token ends an answer. The reward is the share of even words, in Python. Ours is what `python -m jaxstack.reinforce`
runs, without its logs and checkpoints: bfloat16 with float32 weights. The peers, of llama3-1b, are TRL with
transformers' continuous batching, and with its plain `generate`, set up as benchmarks/peers/trl_grpo.py says.

Each runs in a process of its own: two steps to warm up, and then at least `--seconds` (30) and three steps; times are
medians. `rollout_seconds` have all that sampling needs, such as a copy of the weights; `tokens_per_second_per_device`
counts prompts and answers over the whole step, `sampled_tokens_per_second` the answers over the rollout.
`sampler_logprob_difference` is the mean difference of a sampled token's log-probability between sampler and trainer.
`programs_compiled_late` is the number of our programs that were compiled after the first step. Rows are appended to
benchmarks/results/reinforce.jsonl.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table, require_commit
from benchmarks.steps import run_as_command, run_process
from benchmarks.sustained import SECONDS
from benchmarks.training.reinforce_task import PROMPTS, REWARDS, TOKENIZER, Measurement, StepSeconds, Work

PEERS = ("generate", "continuous")
PEER = Path(__file__).resolve().parents[1] / "peers" / "trl_grpo.py"
ADAPTERS = "adapters={rules: [{path: attention|mlp, rank: 16}]}"
SMALL = (
    "model.num_layers=2", "model.hidden_size=64", "model.intermediate_size=128", "model.num_heads=4",
    "model.num_kv_heads=2", "model.head_dim=16", "model.vocab_size=512",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A model and its layout.

    Attributes:
        model: Overrides of jaxstack's configuration that choose the model.
        layout: Further overrides, of ours alone.
        devices: Number of devices.
        peers: True if peers can do the same.
        microbatches: Parts in which ours trains on the answers of a step.
    """

    model: tuple[str, ...]
    layout: tuple[str, ...] = ()
    devices: int = 1
    peers: bool = False
    microbatches: int = 8

    def work(self, tiny: bool) -> Work:
        """Return the sizes of a rollout."""
        if tiny:
            sizes = {"vocabulary": 512, "prompts": 4, "samples": 4, "prompt_tokens": 32, "answer_tokens": 32}
            return Work(model=(*self.model, "model.scan_layers=false", *SMALL), microbatches=2, **sizes)
        sizes = {"vocabulary": 128256, "prompts": 32, "samples": 8, "prompt_tokens": 256, "answer_tokens": 512}
        return Work(model=(*self.model, "model.scan_layers=false"), microbatches=self.microbatches, **sizes)


VARIANTS = {
    "llama3-1b": Variant(("model.preset=llama3-1b",), peers=True),
    "llama3-8b-lora": Variant(("model.preset=llama3-8b",), (ADAPTERS,), microbatches=32),
    "llama3-1b-fsdp2": Variant(("model.preset=llama3-1b",), ("parallel={fsdp: 2, data: 1}",), devices=2),
}
COMPARED = ("jaxstack", "jaxstack, exact")
EXACT = "rollout.engine.exact=true"
COMPILED = "/jax/core/compile/backend_compile_duration"
"""Event of JAX for each program that it compiles, or reads from its cache."""
COLUMNS = (
    "implementation", "samples_per_second", "tokens_per_second_per_device", "step_seconds", "rollout_seconds",
    "reward_seconds", "train_seconds", "rollout_share", "sampled_tokens_per_second", "sampler_logprob_difference",
    "peak_memory_bytes", "sm_mhz", "watts",
)  # fmt: skip


def overrides(work: Work, folder: Path) -> list[str]:
    """Return our configuration of the work whose files are in a folder."""
    return [
        *work.model,
        f"run.dir={folder}", "run.name=reinforce",
        f"data.sources=[{{path: {folder / PROMPTS}, format: prompt}}]",
        f"data.tokenizer={{name: file, path: {folder / TOKENIZER}}}",
        "data.chat.template=none", "data.held_out_fraction=0",
        f"reward=[{{name: python, path: '{folder / REWARDS}:even_share'}}]",
        f"policy={{loss: grpo, samples: {work.samples}, overlong: keep}}",
        f"rollout={{prompts: {work.prompts}, max_tokens: {work.answer_tokens}}}",
        f"train.sequence_length={work.length}", "train.steps=100000",
        f"train.gradient_accumulation={work.microbatches}",
        "optimizer={learning_rate: 1.0e-6, weight_decay: 0.0}", "schedule={name: constant, warmup_steps: 0}",
    ]  # fmt: skip


def measure_jaxstack(folder: Path, settings: Sequence[str], seconds: float, longest: float) -> dict[str, Any]:
    """Return the row of our step.

    Args:
        folder: The files of the work.
        settings: Further overrides of the configuration.
        seconds: Length of the measurement.
        longest: Limit of all steps together, see `Measurement`.
    """
    import jax

    from jaxstack.distributed.device_setup import cache_compilations, start_devices
    from jaxstack.observe.throughput import peak_memory_bytes
    from jaxstack.reinforce.task import ReinforcementTask
    from jaxstack.run.build import resolve_model
    from jaxstack.run.setting import Setting
    from jaxstack.run_config import load_config

    work = Work.read(folder)
    config = load_config(None, [*overrides(work, folder), *settings])
    start_devices()
    cache_compilations()
    config = Setting.of(config, "train").config
    config.directory.mkdir(parents=True, exist_ok=True)  # samples of answers are written there
    task = ReinforcementTask()
    task.check(config)
    data = task.open(config, lambda text: print(text, file=sys.stderr))
    data.prompts.stop_tokens = frozenset()  # no token ends an answer
    config = config.model_copy(update={"model": resolve_model(config.model, data.vocab_size)})
    trainer = task.make_trainer(config, data, None)
    began = time.perf_counter()
    trainer.compile(trainer.peek_batch(0), create_state=True)
    compile_seconds = time.perf_counter() - began
    measurement = Measurement(work, seconds, longest)
    compilations: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compilations.append(event) if event == COMPILED else None
    )
    known: list[int] = []
    differences: list[float] = []
    going = True
    batches = trainer.batches(0)
    ended = time.perf_counter()
    while going:
        batch, _ = next(batches)
        metrics = trainer.read(trainer.train_step(batch))
        now = time.perf_counter()
        step = now - ended
        ended = now
        if metrics["answer_tokens"] != work.answer_tokens:
            raise SystemExit(f"answers have {metrics['answer_tokens']} tokens, not {work.answer_tokens}")
        rollout, reward = metrics["rollout_seconds"], metrics["reward_seconds"]
        going = measurement.add(StepSeconds(step, rollout, reward, step - rollout - reward))
        known.append(len(compilations))
        differences.append(metrics["sampler_logprob_difference"])
    batches.close()
    task.close()
    count = jax.device_count()
    row = measurement.row
    row["tokens_per_second_per_device"] /= count
    return {
        "implementation": COMPARED[config.rollout.engine.exact], "device": jax.devices()[0].device_kind,
        "devices": count, **row,
        "peak_memory_bytes": peak_memory_bytes(), "sampler_logprob_difference": differences[-1],
        "weights": "float32", "compile_seconds": compile_seconds,
        "programs_compiled_late": known[-1] - known[0], "overrides": [*work.model, *settings],
    }  # fmt: skip


def peers_of(wanted: Sequence[str]) -> list[str]:
    """Return the wanted peers if TRL is installed; else say that it is not."""
    missing = [name for name in ("trl", "datasets") if importlib.util.find_spec(name) is None]
    if wanted and missing:
        print(f"no rows of TRL: {', '.join(missing)} not installed", flush=True)
        return []
    return [*wanted]


def commands(args: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Return the arguments of Python of each measurement."""
    limits = [f"--seconds={args.seconds}", f"--longest={args.longest}"]
    variant = VARIANTS[args.work]
    ours = [__file__, "--worker", str(folder), *limits, "--set", *variant.layout, *args.set]
    peers = {
        f"TRL, {peer}": [str(PEER), str(folder), peer, *limits]
        for peer in peers_of(args.peers if variant.peers else [])
    }
    exact = {"jaxstack, exact": [*ours, EXACT]} if args.exact else {}
    return {"jaxstack": ours, **exact, **peers}


def main() -> None:
    """Measure each implementation in turn; a row is appended as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="llama3-1b", choices=VARIANTS, help="model and layout")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="peers measured in the same run")
    parser.add_argument("--exact", action="store_true", help="also measure ours with rollout.engine.exact")
    parser.add_argument("--rounds", type=positive(int), default=1, help="number of turns of each implementation")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="overrides for ours")
    parser.add_argument("--seconds", type=positive(float), default=SECONDS, help="length after the warm-up")
    parser.add_argument("--longest", type=positive(float), default=200, help="seconds after which fewer steps do")
    parser.add_argument("--timeout", type=positive(float), default=400, help="time limit of a measurement, in seconds")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; rows go to tiny/")
    parser.add_argument("--worker", type=Path, help="measure ours on the work in this folder, and print the row")
    args = parser.parse_args()
    if args.worker is not None:
        run_as_command(
            "reinforce.py",
            lambda: print(json.dumps(measure_jaxstack(args.worker, args.set, args.seconds, args.longest))),
        )
    script = "tiny/reinforce" if args.tiny else "reinforce"
    require_commit(script)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        work = VARIANTS[args.work].work(args.tiny)
        work.write(Path(place))
        for title, command in [*commands(args, Path(place)).items()] * args.rounds:
            row = run_process(title, command, args.timeout)
            if row is not None:
                rows.append({"work": f"{args.work}{' tiny' * args.tiny} {work.shape}", **row})
                append_rows(script, rows[-1:])
    if not rows:
        raise SystemExit(1)
    print_table(rows, COLUMNS)
    seconds = {name: [row["step_seconds"] for row in rows if row["implementation"] == name] for name in COMPARED}
    if all(seconds.values()):
        usual, exact = map(median, seconds.values())
        print(f"a step with exact log-probabilities takes {exact / usual:.2f} times as long")


if __name__ == "__main__":
    main()
