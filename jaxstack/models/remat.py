"""What the backward pass of a layer finds saved: the named policies of `ModelConfig.remat`."""

from collections.abc import Callable
from typing import Any

import jax

from jaxstack.parallel import gathers_shards, save_all_but_gathered
from pallas_kernels import save_attention

LAYER_INPUT = "block_input"
"""The name, of `checkpoint_name`, that a layer gives its input."""

_policies = jax.checkpoint_policies
_offload_inputs = _policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device",
    offload_dst="pinned_host",
)


def _offload_inputs_beside_attention(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
    return save_attention(primitive, *arguments, **parameters) or _offload_inputs(primitive, *arguments, **parameters)


POLICIES: dict[str, Callable[..., Any]] = {
    "none": save_all_but_gathered,
    "full": _policies.nothing_saveable,
    "save_attention": save_attention,
    "save_dots": _policies.save_from_both_policies(_policies.dots_with_no_batch_dims_saveable, save_attention),
    "offload": _offload_inputs,
    "save_attention_offload": _offload_inputs_beside_attention,
}
OFFLOADED = ("offload", "save_attention_offload")
"""Policies that keep a layer's input in the memory of the host."""
MATMULS_SAVED = ("none", "save_dots")
"""Policies that keep the MLP's activations."""


def rematerialise(body: Callable[..., Any], policy: str, *, scanned: bool) -> Callable[..., Any]:
    """`body` under `jax.checkpoint` with one of `POLICIES`."""
    if policy == "none" and not gathers_shards():
        return body
    # Inside a scan the loop itself keeps XLA from merging the recomputation with the original.
    return jax.checkpoint(body, policy=POLICIES[policy], prevent_cse=not scanned)
