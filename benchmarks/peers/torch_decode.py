"""Greedy decoding by a PyTorch Llama with a static cache, compiled with CUDA graphs: the peer of `generate.py`.

    python -m benchmarks.peers.torch_decode model.preset=llama3-1b --batch 1 16 64 --prompt 512 --tokens 128

Prints a JSON object per batch. The prompt runs without compilation; its time is not reported.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers.torch_llama import Block, TorchLlama, rotate
from benchmarks.peers.torch_step import make_module
from jaxstack.run_config import load_config

CALLS = 3


class KeyValueCache(nn.Module):
    """Keys and values of one layer [batch, kv heads, room, head_dim], written in place."""

    def __init__(self, batch: int, kv_heads: int, room: int, block: Block) -> None:
        super().__init__()
        weight = block.key.weight
        shape = (batch, kv_heads, room, block.head_dim)
        for name in ("keys", "values"):
            zeros = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
            self.register_buffer(name, zeros, persistent=False)

    def put(self, positions: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new positions [time]; return those of all positions."""
        self.keys[:, :, positions] = key
        self.values[:, :, positions] = value
        return self.keys, self.values


class TorchDecoder(nn.Module):
    """Further tokens [batch, time] at positions [time] -> the likeliest next tokens [batch, 1]."""

    def __init__(self, llama: TorchLlama, batch: int, room: int) -> None:
        super().__init__()
        self.llama = llama
        self.caches = nn.ModuleList(
            KeyValueCache(batch, block.key.out_features // block.head_dim, room, block) for block in llama.blocks
        )
        self.register_buffer("slots", torch.arange(room, device=llama.head.weight.device), persistent=False)

    def attend(self, block: Block, cache: KeyValueCache, x: Tensor, positions: Tensor) -> Tensor:
        """Attention of new tokens x [batch, time, hidden]: several to each other, one to the cache."""
        cos, sin = (table[positions].to(x.dtype) for table in (self.llama.cos, self.llama.sin))
        query, key, value = (
            layer(x).unflatten(-1, (-1, block.head_dim)).transpose(1, 2)
            for layer in (block.query, block.key, block.value)
        )
        query = rotate(query, cos, sin)
        key = rotate(key, cos, sin)
        keys, values = cache.put(positions, key, value)
        if x.shape[1] > 1:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            # The query heads of a key head take the place of the time, so that keys are not repeated.
            grouped = query.reshape(query.shape[0], keys.shape[1], -1, block.head_dim)
            visible = (self.slots <= positions)[None, None, None]
            mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible)
            mixed = mixed.reshape(query.shape)
        return block.attention_out(mixed.transpose(1, 2).flatten(2))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.llama.tokens(tokens)
        for block, cache in zip(self.llama.blocks, self.caches, strict=True):
            x = x + self.attend(block, cache, block.attention_norm(x), positions)
            hidden = block.mlp_norm(x)
            x = x + block.mlp_out(functional.silu(block.gate(hidden)) * block.up(hidden))
        return self.llama.head(self.llama.final_norm(x[:, -1:])).argmax(-1)


@torch.no_grad()
def generate(decoder: TorchDecoder, step: nn.Module, prompts: Tensor, tokens: int) -> tuple[Tensor, float]:
    """Return the new tokens [batch, tokens] of prompts [batch, time], and the seconds of each step after the first."""
    device = prompts.device
    length = prompts.shape[1]
    token = decoder(prompts, torch.arange(length, device=device))
    found = [token]
    position = torch.tensor([length], device=device)
    _ = token.cpu()  # waits for the device
    began = time.perf_counter()
    for _ in range(tokens - 1):
        # The next replay of a CUDA graph overwrites its outputs.
        token = step(token, position).clone()
        found.append(token)
        position += 1
    whole = torch.cat(found, 1).cpu()
    return whole, (time.perf_counter() - began) / (tokens - 1)


def measure(llama: TorchLlama, vocabulary: int, batch: int, prompt: int, tokens: int) -> float:
    """Return the seconds of a step, the fastest of a few calls."""
    device = llama.head.weight.device
    decoder = TorchDecoder(llama, batch, prompt + tokens)
    step = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)
    prompts = torch.randint(0, vocabulary, (batch, prompt), device=device)
    # The first calls compile the step and record its CUDA graph.
    return min([generate(decoder, step, prompts, tokens)[1] for _ in range(2 + CALLS)][2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="texts at a time")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate")
    args = parser.parse_intermixed_args()
    # jax-triton, where it is imported, sets this to the empty string, with which Triton cannot compile for PyTorch.
    if not os.environ.get("TRITON_CACHE_DIR"):
        os.environ.pop("TRITON_CACHE_DIR", None)
    model = load_config(None, args.overrides).model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    llama = make_module(model, args.prompt + args.tokens).to(device=device, dtype=torch.bfloat16)
    assert isinstance(llama, TorchLlama), "make_module returns a GPT-2 only for learned positions"
    for batch in args.batch:
        torch.compiler.reset()
        seconds = measure(llama, llama.head.out_features, batch, args.prompt, args.tokens)
        name = f"PyTorch {torch.__version__} Llama, torch.compile"
        print(json.dumps({"implementation": name, "batch": batch, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
