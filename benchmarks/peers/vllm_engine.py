"""vLLM with random weights, the peer of `benchmarks/serving/serve.py`: tokens/s of many requests, time of a step.

    python benchmarks/peers/vllm_engine.py FOLDER --work throughput latency --requests 768 --prompt 1000 --tokens 1000

FOLDER has a config.json. It runs in an environment with vLLM, of which it imports nothing else of jaxstack; prints a
JSON object per measurement. Prompts are random tokens; answers are greedy and of full length (`ignore_eos`), and are
not turned into text. There is no prefix cache, no sampler of FlashInfer and no DeepGEMM, and the engine is in this
process; all other settings are vLLM's defaults, with CUDA graphs and torch.compile.
"""

import argparse
import json
import os
import statistics
import sys
import time

VOCABULARY = 32000
"""Ids of the prompts are below it."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with config.json")
    parser.add_argument("--work", nargs="+", default=["throughput"], choices=["throughput", "latency"])
    parser.add_argument("--requests", type=int, default=768, help="requests of throughput, all at once")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of an answer")
    parser.add_argument("--latency", type=int, nargs=2, default=(512, 128), help="tokens of prompt, answer of latency")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="requests at once, of latency")
    parser.add_argument("--turns", type=int, default=3, help="repetitions of latency")
    parser.add_argument("--cache-fp8", action="store_true", help="keys and values in FP8")
    parser.add_argument("--fp8", action="store_true", help="weights and inputs of dense layers in FP8")
    return parser.parse_args()


def start(args: argparse.Namespace):
    """Return vLLM's engine with random weights."""
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_HOST_IP="127.0.0.1",
        VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_DEEP_GEMM="0", GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo",
    )  # fmt: skip
    from vllm import LLM

    return LLM(
        model=args.model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
        max_model_len=args.prompt + args.tokens + 16, enable_prefix_caching=False, disable_log_stats=True,
        kv_cache_dtype="fp8" if args.cache_fp8 else "auto", quantization="fp8" if args.fp8 else None,
    )  # fmt: skip


def seconds_of(llm, count: int, prompt: int, tokens: int, seed: int) -> float:
    """Submit requests at once; return the seconds until the last answer has ended."""
    import numpy as np
    from vllm import SamplingParams

    prompts = np.random.default_rng(seed).integers(0, VOCABULARY, (count, prompt)).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    found = sum(len(answer.outputs[0].token_ids) for answer in answers)
    if found != count * tokens:
        raise AssertionError(f"vLLM gave {found} tokens instead of {count * tokens}.")
    return seconds


def latency(llm, args: argparse.Namespace, batch: int) -> dict[str, float]:
    """Return the seconds to the first token of all prompts, and of each further step; medians."""
    prompt, tokens = args.latency
    seconds_of(llm, batch, prompt, 8, 98)
    first = [seconds_of(llm, batch, prompt, 1, turn) for turn in range(args.turns)]
    whole = [seconds_of(llm, batch, prompt, tokens, turn) for turn in range(args.turns)]
    step = (statistics.median(whole) - statistics.median(first)) / (tokens - 1)
    return {"first": statistics.median(first), "step": step}


def settings(llm) -> dict[str, object]:
    """Return vLLM's version, and the sizes that it chose."""
    import torch
    import vllm

    config = llm.llm_engine.vllm_config
    pages = config.cache_config.num_gpu_blocks or 0
    return {
        "vllm": vllm.__version__, "torch": torch.__version__,
        "slots": config.scheduler_config.max_num_seqs, "step_tokens": config.scheduler_config.max_num_batched_tokens,
        "cache_tokens": pages * config.cache_config.block_size,
    }  # fmt: skip


def main() -> int:
    args = parse()
    began = time.perf_counter()
    llm = start(args)
    common = settings(llm) | {"start_seconds": time.perf_counter() - began}
    seconds_of(llm, 32, 256, 32, 99)
    if "latency" in args.work:
        for batch in args.batches:
            print(json.dumps({"work": "latency", "batch": batch, **latency(llm, args, batch), **common}), flush=True)
    if "throughput" in args.work:
        seconds = seconds_of(llm, args.requests, args.prompt, args.tokens, 4)
        print(json.dumps({"work": "throughput", "seconds": seconds, **common}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
