"""torchtitan's training step on random tokens, at the sizes of a Llama 3 or of a Qwen 3 with a mixture in every layer.

`measure` starts one process per device with torchrun; each runs this file as a program. It is written for torchtitan
0.2.2; with another version, names that are missing there end it with their error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.sustained import SECONDS, block_steps, measure_blocks
from benchmarks.turns import Turn

WARMUP = 3
LAYERS = 2
"""Layers of the smaller model that is compiled before the turn."""
MULTIPLE = 256
"""torchtitan rounds a Llama's inner width up to a multiple of this."""
NO_RECOMPUTE = 1.5e9
"""Layers x width x tokens a device up to which torchtitan's activations fit an H200."""


def arguments_of(config: Any) -> list[str]:
    """Return torchtitan's options for a run's configuration.

    Raises:
        SystemExit: This peer does not cover the layout or the model.
    """
    model = config.model
    train = config.train
    parallel = config.parallel
    degrees = {axis: degree for axis, degree in parallel.degrees.items() if degree > 1}
    covered = {"fsdp", "expert"} if model.moe else {"fsdp", "context", "tensor"}
    known = model.mlp == "gated" and not model.tie_word_embeddings and model.positions == "rope"
    if not known or len(degrees) > 1 or not set(degrees) <= covered:
        raise SystemExit(
            "the torchtitan peer covers Llama 3 on one device, or with one of fsdp, context and tensor, and the "
            "mixtures of Qwen 3 on one device, or with one of fsdp and expert."
        )
    model_arguments(model)
    rows = train.global_batch_size // (parallel.fsdp * parallel.expert)
    context = parallel.context
    tokens = rows * train.sequence_length / context
    few = model.num_layers * model.hidden_size * tokens <= NO_RECOMPUTE
    recompute = "none" if few else "full" if train.sequence_length > 32768 else "selective"
    found = {
        "model.name": "jaxstack_peer", "model.flavor": "peer", "training.local_batch_size": rows,
        "training.seq_len": train.sequence_length, "training.steps": 100_000, "training.max_norm": 1.0,
        "parallelism.data_parallel_shard_degree": -1, "parallelism.context_parallel_degree": context,
        "parallelism.tensor_parallel_degree": parallel.tensor,
        "parallelism.expert_parallel_degree": parallel.expert, "activation_checkpoint.mode": recompute,
        "activation_checkpoint.selective_ac_option": "op", "metrics.log_freq": 100_000, "debug.seed": 0,
    }  # fmt: skip
    options = [f"--{name}={value}" for name, value in found.items()] + ["--compile.enable"]
    if config.precision.fp8 != "none":
        options += ["--model.converters=quantize.linear.float8", "--quantize.linear.float8.filter_fqns=output"]
        if parallel.fsdp > 1:
            options.append("--quantize.linear.float8.enable_fsdp_float8_all_gather")
            options.append("--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp")
    return options


def model_arguments(model: Any) -> tuple[str, dict[str, Any]]:
    """Return torchtitan's family of the model, `llama3` or `qwen3`, and its arguments there; `moe_args` is a dict.

    Raises:
        SystemExit: torchtitan has no model of these sizes.
    """
    common = {
        "dim": model.hidden_size, "n_layers": model.num_layers, "n_heads": model.num_heads,
        "n_kv_heads": model.kv_heads, "vocab_size": model.vocab_size, "rope_theta": model.rope_theta,
    }  # fmt: skip
    moe = model.moe
    if moe is None:
        if model.qk_norm or model.intermediate_size % MULTIPLE:
            raise SystemExit("the torchtitan peer needs an inner width divisible by 256, and no norm of queries.")
        if model.width_per_head * model.num_heads != model.hidden_size:
            raise SystemExit("the torchtitan peer needs heads that are together as wide as the model.")
        scale = model.intermediate_size / int(8 * model.hidden_size / 3)
        return "llama3", {**common, "multiple_of": MULTIPLE, "ffn_dim_multiplier": scale}
    everywhere = not moe.first_k_dense_replace and moe.decoder_sparse_step == 1
    if not model.qk_norm or not everywhere or moe.n_shared_experts or moe.capacity_factor:
        raise SystemExit(
            "the torchtitan peer covers mixtures of Qwen 3: one in every layer, no shared experts, no capacity."
        )
    experts = {
        "num_experts": moe.num_experts, "num_shared_experts": 0, "top_k": moe.num_experts_per_tok,
        "score_func": moe.scoring_func, "route_norm": moe.norm_topk_prob, "route_scale": moe.routed_scaling_factor,
        "score_before_experts": False,
    }  # fmt: skip
    return "qwen3", {
        **common, "head_dim": model.width_per_head, "hidden_dim": model.intermediate_size, "norm_eps": model.norm_eps,
        "qk_norm": True, "moe_enabled": True, "moe_inter_dim": moe.moe_intermediate_size, "moe_args": experts,
    }  # fmt: skip


def measure(config: Any, turn: Turn, seconds: float = SECONDS) -> dict[str, Any]:
    """Measure the sustained time of a step in separate processes; return it with losses, peak memory and title.

    Where other processes compile at the same time, a few steps of a model with fewer layers are taken first. They fill
    PyTorch's caches on disk with the compiled code of a layer, so that little is compiled during the turn. Logits and
    their gradients take as much memory as in the whole model, so one process at a time does this.

    Args:
        config: the run's configuration.
        turn: this process's turn; the measured processes use no GPU before it.
        seconds: length of the measurement.
    """
    family, sizes = model_arguments(config.model)
    if turn.shared:
        with turn.memory():
            launch(config, family, {**sizes, "n_layers": min(LAYERS, sizes["n_layers"])}, 0.0, lambda: None)
    return launch(config, family, sizes, seconds, turn.wait)


def launch(
    config: Any, family: str, sizes: dict[str, Any], seconds: float, ready: Callable[[], None]
) -> dict[str, Any]:
    """Return what the process of rank 0 measured. All processes import torchtitan, then wait until `ready` returns."""
    devices = math.prod(config.parallel.degrees.values())
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        # Without an address, processes look for the first one by the host's name, which not every host can resolve.
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        launcher.append(f"--nproc-per-node={devices}")
        command = [sys.executable, *launcher, __file__, str(output), json.dumps([family, sizes]), str(seconds)]
        command += arguments_of(config)
        command.append(f"--job.dump_folder={folder}")
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, text=True, **pipes) as process:
            ready()
            said, errors = process.communicate("." * devices)  # one for each process
        if process.returncode or not output.exists():
            raise SystemExit(f"torchtitan failed:\n{(errors or said)[-3000:]}")
        return json.loads(output.read_text(encoding="utf-8"))


def make_spec(family: str, sizes: dict[str, Any]) -> Any:
    """Return torchtitan's specification of the model, on random tokens."""

    def random_batches(job_config: Any, **_: Any) -> Any:
        return RandomBatches(job_config.training.local_batch_size, job_config.training.seq_len, sizes["vocab_size"])

    if family == "llama3":
        from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec

        arguments: Any = TransformerModelArgs(**sizes)
    else:
        from torchtitan.models.moe import MoEArgs
        from torchtitan.models.qwen3 import Qwen3ModelArgs, get_train_spec

        arguments = Qwen3ModelArgs(**{**sizes, "moe_args": MoEArgs(**sizes["moe_args"])})
    return dataclasses.replace(
        get_train_spec(), model_args={"peer": arguments}, build_tokenizer_fn=None, build_dataloader_fn=random_batches,
        state_dict_adapter=None,
    )  # fmt: skip


def run(output: str, model: tuple[str, dict[str, Any]], seconds: float, options: Sequence[str]) -> None:
    """Train in one process of the job; the process of rank 0 writes the measurement."""
    import torch
    import torchtitan
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    class Measured(Trainer):
        """A trainer that stores the last loss, which torchtitan only logs."""

        last_loss: Any = None

        def forward_backward_step(self, **inputs: Any) -> Any:
            loss = super().forward_backward_step(**inputs)
            self.last_loss = loss.detach()
            return loss

    register_train_spec("jaxstack_peer", make_spec(*model))
    if not os.read(sys.stdin.fileno(), 1):
        raise SystemExit("The process that started this one ended before its turn.")
    trainer = Measured(ConfigManager().parse_args(list(options)))
    batches = trainer.batch_generator(trainer.dataloader)

    def loss() -> float:
        total = trainer.last_loss.float().clone()
        torch.distributed.all_reduce(total)
        tensor = trainer.job_config.parallelism.tensor_parallel_degree
        return float(total) / tensor

    on_gpu = torch.cuda.is_available()
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None

    def steps(count: int) -> None:
        for _ in range(count):
            trainer.step += 1
            trainer.train_step(batches)
        synchronize()

    def elapsed(passed: float) -> float:
        """Seconds on which all processes agree."""
        shared = torch.tensor(passed, device=trainer.device)
        torch.distributed.broadcast(shared, 0)
        return float(shared)

    steps(1)
    losses = [loss()]
    steps(WARMUP - 2)
    began = time.perf_counter()
    steps(1)
    count = block_steps(elapsed(time.perf_counter() - began), seconds)
    times = measure_blocks(steps, count, seconds, elapsed)
    losses.append(loss())
    mode = trainer.job_config.activation_checkpoint.mode
    if torch.distributed.get_rank() == 0:
        found = {
            "implementation": f"torchtitan {torchtitan.__version__}, compiled, recompute {mode}",
            "device": torch.cuda.get_device_name(0) if on_gpu else "cpu", **times,
            "first_loss": losses[0], "last_loss": losses[1],
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        }  # fmt: skip
        Path(output).write_text(json.dumps(found), encoding="utf-8")
    trainer.close()
    torch.distributed.destroy_process_group()


class RandomBatches:
    """Endless random tokens on the host, in the form of torchtitan's data loaders."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        self.size = (rows, length)
        self.vocabulary = vocabulary

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        import torch

        generator = torch.Generator().manual_seed(0)
        while True:
            tokens, labels = (torch.randint(0, self.vocabulary, self.size, generator=generator) for _ in range(2))
            yield {"input": tokens}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: the batches are random."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("model", type=json.loads)
    parser.add_argument("seconds", type=float)
    known, rest = parser.parse_known_args()

    from torch.distributed.elastic.multiprocessing.errors import record

    record(run)(known.output, known.model, known.seconds, rest)
