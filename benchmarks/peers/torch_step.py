"""The PyTorch peers' training step: forward in a compute dtype, backward, clipping at 1, fused AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.torch_gpt import GptShape, TorchGpt
from benchmarks.peers.torch_llama import LlamaShape, TorchLlama


def make_module(model: Any, sequence_length: int) -> nn.Module:
    """The PyTorch module of a `jaxstack.models.ModelConfig`.

    Raises:
        SystemExit: neither a GPT-2 nor a Llama.
    """
    layers = model.num_layers
    heads = model.num_heads
    width = model.hidden_size
    vocabulary = model.vocab_size
    if model.positions == "learned" and model.mlp == "plain" and model.tie_word_embeddings:
        return TorchGpt(GptShape(layers, heads, width, sequence_length, vocabulary, model.mlp_bias))
    llama = model.positions == "rope" and model.mlp == "gated" and model.norm == "rms_norm" and model.moe is None
    if llama and not (model.tie_word_embeddings or model.qkv_bias or model.qk_norm or model.post_norms):
        # Llama 3.1's scaled frequencies have other values at the same cost.
        sizes = heads, model.kv_heads, model.width_per_head, width, model.intermediate_size
        return TorchLlama(LlamaShape(layers, *sizes, sequence_length, vocabulary, model.rope_theta))
    raise SystemExit("the PyTorch peers are GPT-2 and Llama (untied head, no biases); this model is neither.")


def make_optimizer(module: nn.Module, learning_rate: float = 1e-3, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """AdamW in its fused form; weight decay on matrices and embeddings only."""
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.99), fused=True)


class TorchStep:
    """One training step. `compiled` puts model and loss through `torch.compile`; `autocast` is the compute dtype."""

    def __init__(
        self, module: nn.Module, *, compiled: bool = False, device: str = "cpu", autocast: torch.dtype | None = None
    ) -> None:
        self.module = module.to(device)
        self.optimizer = make_optimizer(self.module)
        self.forward = torch.compile(self.module) if compiled else self.module
        self.autocast = torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None)

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with self.autocast:
            loss = self.forward(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
