"""A Llama in PyTorch: the peer of the Llama works of `train_step.py` on one device.

RMSNorm before each block, rotary positions, grouped-query causal attention by `scaled_dot_product_attention`, SwiGLU,
an output head of its own (Touvron et al. 2023, Grattafiori et al. 2024).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of the model. `block_size` is the longest sequence, in tokens."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    block_size: int
    vocab_size: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5


def rotary_tables(shape: LlamaShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines [block, head_dim] of the rotated halves."""
    frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.outer(torch.arange(shape.block_size), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x [batch, heads, time, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Block(nn.Module):
    """One decoder layer on activations [batch, time, hidden]."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        width = shape.hidden_size
        heads = shape.num_heads
        kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.attention_norm = nn.RMSNorm(width, shape.norm_eps)
        self.query = nn.Linear(width, heads * shape.head_dim, bias=False)
        self.key = nn.Linear(width, kv_heads * shape.head_dim, bias=False)
        self.value = nn.Linear(width, kv_heads * shape.head_dim, bias=False)
        self.attention_out = nn.Linear(heads * shape.head_dim, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, shape.norm_eps)
        self.gate = nn.Linear(width, shape.intermediate_size, bias=False)
        self.up = nn.Linear(width, shape.intermediate_size, bias=False)
        self.mlp_out = nn.Linear(shape.intermediate_size, width, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query = rotate(query, cos, sin)
        key = rotate(key, cos, sin)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), cos, sin)
        hidden = self.mlp_norm(x)
        return x + self.mlp_out(functional.silu(self.gate(hidden)) * self.up(hidden))


class TorchLlama(nn.Module):
    """Tokens [batch, time] and labels of the same shape -> mean cross-entropy in nats."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.final_norm = nn.RMSNorm(shape.hidden_size, shape.norm_eps)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        cos, sin = rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.num_layers) if residual else 0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens)
        length = tokens.shape[1]
        cos, sin = (table[:length].to(x.dtype) for table in (self.cos, self.sin))
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.final_norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
