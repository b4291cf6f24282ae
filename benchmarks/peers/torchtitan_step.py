"""torchtitan's training step on random tokens, at the sizes of a Llama 3, Qwen 3, DeepSeek V2 or gpt-oss.

`measure` starts one process per device with torchrun; each runs this file as a program. It is written for torchtitan
0.2.2 with torchao 0.16; with another version, names that are missing there end it with their error.

torchtitan's models run as it has them, with two differences. Its gpt-oss keeps the weights of its layers in bfloat16;
here they are float32, as in its other models. And `--compile.enable` has no effect on the layers of that gpt-oss, so
they are compiled as those of its other mixtures are; torchtitan's next version does it too.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import re
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
ERROR = re.compile(r"^(?:\[rank\d+\]:)?\s*((?:[\w.]+\.)?(?!ChildFailed)\w+Error: .+)$", re.MULTILINE)
"""The line of a traceback that names the error, but not the one that torchrun's own process ends with."""
NO_RECOMPUTE = 1.5e9
"""Layers x width x tokens a device up to which torchtitan's activations fit an H200."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How torchtitan runs a work, beside what the run's configuration says.

    Attributes:
        recompute: torchtitan's mode of activation checkpointing.
        float8: Prefixes of torchtitan's converters to FP8, `linear` and `grouped_mm`: the experts' matrix products.
    """

    recompute: str
    float8: tuple[str, ...] = ()

    def easier(self, out_of_memory: bool) -> Way | None:
        """Return what to try where this way failed, or None if nothing is left."""
        if out_of_memory:
            return None if self.recompute == "full" else dataclasses.replace(self, recompute="full")
        return dataclasses.replace(self, float8=("linear",)) if "grouped_mm" in self.float8 else None

    def __str__(self) -> str:
        experts = ", experts in FP8" if "grouped_mm" in self.float8 else ""
        return f"recompute {self.recompute}{experts}"


class PeerError(SystemExit):
    """torchtitan's processes failed.

    Attributes:
        reason: The line that names the last error.
        out_of_memory: Whether a GPU's memory was too small.
    """

    def __init__(self, output: str) -> None:
        super().__init__(f"torchtitan failed:\n{output[-3000:]}")
        named = ERROR.findall(output)
        self.reason = named[-1].strip()[:300] if named else "no error was printed"
        self.out_of_memory = "OutOfMemoryError" in output


def best_way(config: Any) -> Way:
    """Return the way that torchtitan is fastest in, where it works: little recomputation, all products in FP8."""
    model, train, parallel = config.model, config.train, config.parallel
    rows = train.global_batch_size // (parallel.fsdp * parallel.expert)
    tokens = rows * train.sequence_length / parallel.context
    few = model.num_layers * model.hidden_size * tokens <= NO_RECOMPUTE
    recompute = "none" if few else "full" if train.sequence_length > 32768 else "selective"
    if config.precision.fp8 == "none":
        return Way(recompute)
    return Way(recompute, ("linear", "grouped_mm") if model.moe else ("linear",))


def arguments_of(config: Any, way: Way | None = None) -> list[str]:
    """Return torchtitan's options for a run's configuration.

    Args:
        config: The run's configuration.
        way: How torchtitan runs it; `best_way` by default.

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
            "mixtures of Qwen 3, DeepSeek V2 and gpt-oss on one device, or with one of fsdp and expert."
        )
    family, _ = model_arguments(model)
    if family == "gpt_oss" and degrees:
        raise SystemExit("the torchtitan peer covers gpt-oss on one device: its layers are compiled after sharding.")
    way = way or best_way(config)
    found = {
        "model.name": "jaxstack_peer", "model.flavor": "peer",
        "training.local_batch_size": train.global_batch_size // (parallel.fsdp * parallel.expert),
        "training.seq_len": train.sequence_length, "training.steps": 100_000, "training.max_norm": 1.0,
        "parallelism.data_parallel_shard_degree": -1, "parallelism.context_parallel_degree": parallel.context,
        "parallelism.tensor_parallel_degree": parallel.tensor,
        "parallelism.expert_parallel_degree": parallel.expert, "activation_checkpoint.mode": way.recompute,
        "activation_checkpoint.selective_ac_option": "op", "metrics.log_freq": 100_000, "debug.seed": 0,
    }  # fmt: skip
    options = [f"--{name}={value}" for name, value in found.items()] + ["--compile.enable"]
    return options + float8_arguments(way, sharded=parallel.fsdp > 1)


def float8_arguments(way: Way, sharded: bool) -> list[str]:
    """Return torchtitan's options for matrix products in FP8; head and routers stay in bfloat16."""
    if not way.float8:
        return []
    converters = ",".join(f"quantize.{prefix}.float8" for prefix in way.float8)
    options = [f"--model.converters={converters}", "--quantize.linear.float8.filter_fqns=output,router.gate"]
    if "grouped_mm" in way.float8:
        # torchtitan looks for this in the modules' names; without the dot it would find shared experts too, whose
        # weights belong to linear layers.
        options.append("--quantize.grouped_mm.float8.fqns=moe.experts")
    if sharded:
        options.append("--quantize.linear.float8.enable_fsdp_float8_all_gather")
        options.append("--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp")
    return options


ARGUMENTS = {
    "llama3": "TransformerModelArgs",
    "qwen3": "Qwen3ModelArgs",
    "deepseek_v3": "DeepSeekV3ModelArgs",
    "gpt_oss": "GptOssModelArgs",
}
"""torchtitan's families of models that are covered -> their class of arguments."""


def model_arguments(model: Any) -> tuple[str, dict[str, Any]]:
    """Return torchtitan's family of the model, a name of `ARGUMENTS`, and its arguments there; `moe_args` is a dict.

    Raises:
        SystemExit: torchtitan has no model of these sizes.
    """
    common = {
        "dim": model.hidden_size, "n_layers": model.num_layers, "n_heads": model.num_heads,
        "vocab_size": model.vocab_size, "rope_theta": model.rope_theta,
    }  # fmt: skip
    if model.moe is None:
        return "llama3", {**common, **llama3_arguments(model)}
    experts = {"moe_args": experts_arguments(model.moe)}
    if model.attention.name == "latent":
        return "deepseek_v3", {**common, **deepseek_arguments(model), **experts}
    if getattr(model.attention, "sinks", False):
        return "gpt_oss", {**common, **gpt_oss_arguments(model), **experts}
    return "qwen3", {**common, **qwen3_arguments(model), **experts}


def llama3_arguments(model: Any) -> dict[str, Any]:
    """Return what only torchtitan's Llama 3 has."""
    if model.qk_norm or model.intermediate_size % MULTIPLE:
        raise SystemExit("the torchtitan peer needs an inner width divisible by 256, and no norm of queries.")
    if model.width_per_head * model.num_heads != model.hidden_size:
        raise SystemExit("the torchtitan peer needs heads that are together as wide as the model.")
    scale = model.intermediate_size / int(8 * model.hidden_size / 3)
    return {"n_kv_heads": model.kv_heads, "multiple_of": MULTIPLE, "ffn_dim_multiplier": scale}


def experts_arguments(moe: Any) -> dict[str, Any]:
    """Return the arguments that torchtitan's mixtures share."""
    if moe.capacity_factor or moe.decoder_sparse_step != 1 or moe.shared_expert_gate or moe.weight_inputs:
        raise SystemExit("the torchtitan peer covers mixtures in every layer: no capacity, no gate of shared experts.")
    groups = {"num_expert_groups": moe.n_group, "num_limited_groups": moe.topk_group} if moe.n_group > 1 else {}
    return {
        "num_experts": moe.num_experts, "num_shared_experts": moe.n_shared_experts, "top_k": moe.num_experts_per_tok,
        "score_func": moe.scoring_func, "route_norm": moe.norm_topk_prob, "route_scale": moe.routed_scaling_factor,
        "gate_bias": moe.router_bias, "score_before_experts": False, **groups,
    }  # fmt: skip


def qwen3_arguments(model: Any) -> dict[str, Any]:
    """Return what only torchtitan's Qwen 3 has."""
    moe = model.moe
    if not model.qk_norm or moe.first_k_dense_replace or moe.n_shared_experts or moe.expert_bias or moe.router_bias:
        raise SystemExit(
            "the torchtitan peer covers mixtures of Qwen 3: one in every layer, no shared experts, no biases."
        )
    return {
        "n_kv_heads": model.kv_heads, "head_dim": model.width_per_head, "hidden_dim": model.intermediate_size,
        "norm_eps": model.norm_eps, "qk_norm": True, "moe_enabled": True, "moe_inter_dim": moe.moe_intermediate_size,
    }  # fmt: skip


def deepseek_arguments(model: Any) -> dict[str, Any]:
    """Return what only torchtitan's DeepSeek V3 has, which V2 is a case of.

    Flex attention is what torchtitan chooses for its DeepSeek V2 Lite: it takes values narrower than keys.
    """
    attention = model.attention
    if model.moe.expert_bias or model.moe.router_bias:
        raise SystemExit("the torchtitan peer covers mixtures of DeepSeek V2 and V3: experts without biases.")
    return {
        "inter_dim": model.intermediate_size, "moe_inter_dim": model.moe.moe_intermediate_size,
        "n_dense_layers": model.moe.first_k_dense_replace, "norm_eps": model.norm_eps,
        "q_lora_rank": attention.q_lora_rank or 0, "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.qk_nope_head_dim, "qk_rope_head_dim": attention.qk_rope_head_dim,
        "v_head_dim": attention.v_head_dim, "attn_type": "flex", "attn_mask_type": "causal",
    }  # fmt: skip


def gpt_oss_arguments(model: Any) -> dict[str, Any]:
    """Return what only torchtitan's gpt-oss has."""
    moe = model.moe
    biases = model.qkv_bias and model.output_bias and moe.expert_bias and moe.router_bias
    alternating = tuple(model.layer_types) == ("sliding_attention", "full_attention")
    if not biases or not alternating or moe.n_shared_experts or moe.first_k_dense_replace:
        raise SystemExit(
            "the torchtitan peer covers gpt-oss: all biases, a window in every second layer, no shared experts."
        )
    return {
        "n_kv_heads": model.kv_heads, "head_dim": model.width_per_head, "norm_eps": model.norm_eps,
        "moe_inter_dim": moe.moe_intermediate_size or model.intermediate_size, "swiglu_limit": moe.swiglu_limit,
        "sliding_window_size": model.sliding_window, "attn_mask_type": "causal",
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
    way = best_way(config)
    if turn.shared:
        few = {**sizes, "n_layers": min(LAYERS, sizes["n_layers"])}
        with turn.memory():
            first_way(way, lambda way: launch(config, way, family, few, 0.0, lambda: None))
    return first_way(way, lambda way: launch(config, way, family, sizes, seconds, turn.wait))


def first_way(way: Way, attempt: Callable[[Way], dict[str, Any]]) -> dict[str, Any]:
    """Return what `attempt` measured in the first way that works.

    Where it is not the one that was asked for, the row's `failed` says what did not work.
    """
    failed: list[str] = []
    while True:
        try:
            found = attempt(way)
        except PeerError as error:
            failed.append(f"{way}: {error.reason}")
            print(error, file=sys.stderr, flush=True)
            easier = way.easier(error.out_of_memory)
            if easier is None:
                raise
            way = easier
        else:
            return {**found, "failed": failed} if failed else found


def launch(
    config: Any, way: Way, family: str, sizes: dict[str, Any], seconds: float, ready: Callable[[], None]
) -> dict[str, Any]:
    """Return what the process of rank 0 measured. All processes import torchtitan, then wait until `ready` returns."""
    devices = math.prod(config.parallel.degrees.values())
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        # Without an address, processes look for the first one by the host's name, which not every host can resolve.
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        launcher.append(f"--nproc-per-node={devices}")
        command = [sys.executable, *launcher, __file__, str(output), json.dumps([family, sizes]), str(seconds)]
        command += arguments_of(config, way)
        command.append(f"--job.dump_folder={folder}")
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen(command, text=True, **pipes) as process:
            ready()
            said, errors = process.communicate("." * devices)  # one for each process
        if process.returncode or not output.exists():
            raise PeerError(errors or said)
        found = json.loads(output.read_text(encoding="utf-8"))
        return {**found, "implementation": f"{found['implementation']}, {way}"}


def make_spec(family: str, sizes: dict[str, Any]) -> Any:
    """Return torchtitan's specification of the model, on random tokens."""

    def random_batches(job_config: Any, **_: Any) -> Any:
        return RandomBatches(job_config.training.local_batch_size, job_config.training.seq_len, sizes["vocab_size"])

    module = importlib.import_module(f"torchtitan.models.{family}")
    if "moe_args" in sizes:
        from torchtitan.models.moe import MoEArgs

        sizes = {**sizes, "moe_args": MoEArgs(**sizes["moe_args"])}
    arguments = getattr(module, ARGUMENTS[family])(**sizes)
    spec = module.get_train_spec()
    if family == "gpt_oss":
        spec = gpt_oss_in_float32(spec)
    # torchtitan wants a tokenizer beside flex attention; its causal mask does not use it.
    return dataclasses.replace(
        spec, model_args={"peer": arguments}, build_tokenizer_fn=lambda _: object(),
        build_dataloader_fn=random_batches, state_dict_adapter=None,
    )  # fmt: skip


def gpt_oss_in_float32(spec: Any) -> Any:
    """Return torchtitan's specification of gpt-oss with float32 weights, and with compiled layers."""
    import torch
    from torchtitan.models.gpt_oss.model import moe
    from torchtitan.models.llama4.infra.parallelize import apply_compile

    class Float32Model(spec.model_cls):
        """torchtitan's gpt-oss, whose layers are created in bfloat16."""

        def __init__(self, arguments: Any) -> None:
            super().__init__(arguments)
            self.layers.float()

    def parallelize(model: Any, parallel_dims: Any, job_config: Any) -> Any:
        model = spec.parallelize_fn(model, parallel_dims, job_config)
        if job_config.compile.enable:
            apply_compile(model, job_config.compile, parallel_dims.ep_enabled)
            # The rest of its experts waits for numbers of tokens on the host, which a compiled function cannot.
            moe.swiglu = torch.compile(moe.swiglu)
        return model

    return dataclasses.replace(spec, model_cls=Float32Model, parallelize_fn=parallelize)


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
    if torch.distributed.get_rank() == 0:
        found = {
            "implementation": f"torchtitan {torchtitan.__version__}, compiled",
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
