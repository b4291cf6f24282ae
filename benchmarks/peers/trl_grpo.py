"""GRPO by TRL's GRPOTrainer on one device, for benchmarks/training/reinforce.py: a Llama with random weights.

    python benchmarks/peers/trl_grpo.py FOLDER continuous
    python benchmarks/peers/trl_grpo.py FOLDER generate

Answers are sampled by transformers' continuous batching or by plain `generate`; vLLM is not measured. It is written for
TRL 1.16 with transformers 5.17; TRL needs the packages `datasets`, `dill` and `multiprocess` too.

Settings: the model's weights are bfloat16, as are then the states of AdamW (fused) and the sums of gradients. TRL's
continuous batching makes the weights bfloat16 in any case if `bf16` is set, and its `generate` would run in float32
with float32 weights. Ours has float32 weights and states: the peer's update is the cheaper one. Activations are kept
(`gradient_checkpointing` off), the loss is TRL's `grpo` without a reference, with one update a step, so that no
probabilities are computed before the update. Attention is PyTorch's, as flash-attn is not there. Continuous batching
has TRL's defaults; its cache takes half of the free memory. The end-of-text id is beyond the model's vocabulary, and
never sampled.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.training.reinforce_task import (
    PROMPTS,
    START,
    TOKENIZER,
    Measurement,
    StepSeconds,
    Work,
    check_lengths,
    even_share,
    timed,
)

MOST_STEPS = 100_000
MICROBATCH = 16
"""Answers that are trained on at a time: their activations fit 80 GB without recomputation."""


def model_config(work: Work) -> Any:
    """Return transformers' configuration of the model that the overrides of the work choose."""
    from transformers import LlamaConfig

    from jaxstack.run_config import load_config

    model = load_config(None, [*work.model]).model
    rope = {"rope_theta": model.rope_theta, "rope_type": "default"}
    if model.rope_scaling is not None:
        scaling = model.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    return LlamaConfig(
        vocab_size=work.vocabulary, hidden_size=model.hidden_size, intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads, head_dim=model.head_dim, rms_norm_eps=model.norm_eps,
        max_position_embeddings=model.max_position_embeddings, tie_word_embeddings=model.tie_word_embeddings,
        rope_parameters=rope, bos_token_id=0, eos_token_id=work.vocabulary, pad_token_id=0, use_cache=True,
    )  # fmt: skip


def options(work: Work, folder: str, continuous: bool) -> dict[str, Any]:
    """Return the arguments of TRL's GRPOConfig."""
    import torch

    microbatch = min(MICROBATCH, work.answers)
    found = {
        "output_dir": folder, "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": work.answers // microbatch, "num_generations": work.samples,
        "max_completion_length": work.answer_tokens, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "beta": 0.0,
        "loss_type": "grpo", "num_iterations": 1, "learning_rate": 1e-6, "lr_scheduler_type": "constant",
        "weight_decay": 0.0, "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "bf16": True,
        "gradient_checkpointing": False, "max_steps": MOST_STEPS, "save_strategy": "no", "logging_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "seed": 0, "use_cpu": not torch.cuda.is_available(),
    }  # fmt: skip
    if continuous:
        found["use_transformers_continuous_batching"] = True
    return found


def measure(folder: Path, sampler: str, seconds: float, longest: float) -> dict[str, Any]:
    """Return a row of TRL's step.

    Args:
        folder: The files of the work.
        sampler: `continuous` or `generate`.
        seconds: Length of the measurement.
        longest: Limit of all steps together, see `Measurement`.
    """
    import torch
    from datasets import Dataset
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    work = Work.read(folder)
    cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if cuda else lambda: None
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda" if cuda else "cpu"):
        model = LlamaForCausalLM(model_config(work)).to(torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / TOKENIZER), bos_token=START, eos_token="<end>", pad_token=START
    )
    prompts = [json.loads(line)["prompt"] for line in (folder / PROMPTS).read_text(encoding="utf-8").splitlines()]
    measurement = Measurement(work, seconds, longest)
    rewarded: list[float] = []
    sampled: list[float] = []
    lengths: list[int] = []
    ended = [0.0]

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths[:] = map(len, completion_ids)
        return even_share(completions)

    class Steps(TrainerCallback):
        """Measures each step, and ends the training."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ended[0] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            wait()
            check_lengths(lengths, work)
            now = time.perf_counter()
            step, ended[0] = now - ended[0], now
            rollout, scored = sum(sampled), sum(rewarded)
            sampled.clear()
            rewarded.clear()
            control.should_training_stop = not measurement.add(
                StepSeconds(step, rollout, scored, step - rollout - scored)
            )

    with tempfile.TemporaryDirectory() as place:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=timed(reward, rewarded, wait),
            args=GRPOConfig(**options(work, place, sampler == "continuous")),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[Steps()],
        )
        trainer._generate_single_turn = timed(trainer._generate_single_turn, sampled, wait)
        trainer.train()
    named = {"continuous": "continuous batching", "generate": "generate"}[sampler]
    return {
        "implementation": f"TRL {importlib.metadata.version('trl')}, {named}",
        "device": torch.cuda.get_device_name(0) if cuda else "cpu",
        **measurement.row,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "reserved_memory_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "sampler_logprob_difference": None,  # TRL does not keep the sampler's log-probabilities
        "weights": "bfloat16", "microbatch": min(MICROBATCH, work.answers),
        "attention": model.config._attn_implementation,
        "peer_versions": {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")},
    }  # fmt: skip


def main() -> None:
    """Measure TRL; the last line printed is the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="files of the work")
    parser.add_argument("sampler", choices=["continuous", "generate"], help="how answers are sampled")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the measurement")
    parser.add_argument("--longest", type=float, default=200.0, help="seconds after which no step begins")
    args = parser.parse_args()
    print("\n" + json.dumps(measure(args.folder, args.sampler, args.seconds, args.longest)))


if __name__ == "__main__":
    main()
