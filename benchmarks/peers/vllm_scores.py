"""Log-probabilities that vLLM gives to a text under checkpoints, the peer of `benchmarks/compression/vllm_reads.py`.

    python benchmarks/peers/vllm_scores.py TEXT FOLDER...

TEXT is a JSON file with the ids of the text. The checkpoints are of one family: vLLM makes the groups of a mixture's
experts only in the first engine of a process. It runs in an environment with vLLM, of which it imports nothing else of
jaxstack, and prints a JSON object for each checkpoint: its folder, and either the log-probability of each token but the
first, given those before it, or why vLLM failed. Weights are used without CUDA graphs, FlashInfer and DeepGEMM.
"""

import gc
import json
import os
import sys
from pathlib import Path

MEMORY = 0.12
"""Share of the GPU's memory that an engine may take."""


def score(folder: str, ids: list[int]) -> list[float]:
    """Return the log-probabilities of ids[1:] under the checkpoint."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2 * len(ids), enforce_eager=True,
        gpu_memory_utilization=MEMORY, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    answer = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0]
    return [place[token].logprob for place, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]


def main() -> None:
    """Score the text under each checkpoint in turn."""
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_HOST_IP="127.0.0.1",
        VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_DEEP_GEMM="0", GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo",
    )  # fmt: skip
    # jax-triton, where it is imported, sets this to the empty string, with which Triton cannot compile for PyTorch.
    if not os.environ.get("TRITON_CACHE_DIR"):
        os.environ.pop("TRITON_CACHE_DIR", None)
    import torch
    import vllm

    text, *folders = sys.argv[1:]
    ids = json.loads(Path(text).read_text(encoding="utf-8"))
    for folder in folders:
        found: dict[str, object] = {"folder": folder, "vllm": vllm.__version__}
        try:
            found["log_probabilities"] = score(folder, ids)
        except Exception as error:  # the other checkpoints are scored all the same
            found["failed"] = f"{type(error).__name__}: {error}"[:500]
        gc.collect()
        torch.cuda.empty_cache()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
