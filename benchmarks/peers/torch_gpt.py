"""A GPT in PyTorch: the peer of `cpu_nanogpt.py` and of the GPT-2 works of `train_step.py`.

The architecture follows the GPT-2 recipe: learned positions, LayerNorm before each block, one projection for queries,
keys and values, causal scaled-dot-product attention, a GELU MLP of four times the width, the output head tied to the
token embedding. `bias` switches the biases of linear layers and LayerNorms together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GptShape:
    """The sizes of the model. `block_size` is the longest sequence, in tokens."""

    num_layers: int = 4
    num_heads: int = 4
    hidden_size: int = 128
    block_size: int = 64
    vocab_size: int = 65
    bias: bool = False


class Norm(nn.Module):
    """LayerNorm whose bias is optional."""

    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Block(nn.Module):
    """One decoder layer on activations [batch, time, hidden]."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.num_heads = shape.num_heads
        self.attention_norm = Norm(width, shape.bias)
        self.qkv = nn.Linear(width, 3 * width, bias=shape.bias)
        self.attention_out = nn.Linear(width, width, bias=shape.bias)
        self.mlp_norm = Norm(width, shape.bias)
        self.mlp_in = nn.Linear(width, 4 * width, bias=shape.bias)
        self.mlp_out = nn.Linear(4 * width, width, bias=shape.bias)

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class TorchGpt(nn.Module):
    """Tokens [batch, time] and labels of the same shape -> mean cross-entropy in nats."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(shape.block_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.final_norm = Norm(shape.hidden_size, shape.bias)
        self._initialise(shape.num_layers)

    def _initialise(self, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.final_norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
