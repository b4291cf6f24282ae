"""Rematerialization policies: which activations of a layer are saved for the backward pass."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxstack.parallel import gathers_shards, save_all_but_gathered
from pallas_kernels import save_activated_product, save_attention

LAYER_INPUT = "block_input"
"""Name by which policies recognize the input of a layer."""

Function = TypeVar("Function", bound=Callable[..., Any])

_policies = jax.checkpoint_policies
_offload_inputs = _policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device",
    offload_dst="pinned_host",
)


def _offload_inputs_save_attention(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
    return save_attention(primitive, *arguments, **parameters) or _offload_inputs(primitive, *arguments, **parameters)


_save_dots = _policies.save_from_both_policies(_policies.dots_with_no_batch_dims_saveable, save_activated_product)

POLICIES: dict[str, Callable[..., Any]] = {
    "none": save_all_but_gathered,
    "full": _policies.nothing_saveable,
    "save_attention": save_attention,
    "save_dots": _policies.save_from_both_policies(_save_dots, save_attention),
    "offload": _offload_inputs,
    "save_attention_offload": _offload_inputs_save_attention,
}
OFFLOADED = ("offload", "save_attention_offload")
"""Policies that store the layer inputs in host memory."""
MATMULS_SAVED = ("none", "save_dots")
"""Policies that save the activations of the feed-forward sublayer."""


def name_layer_input(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Name x as a layer's input, so that rematerialization policies can save or offload it."""
    return checkpoint_name(x, LAYER_INPUT)


def rematerialise(body: Function, policy: str, *, scanned: bool) -> Function:
    """Wrap `body` in `jax.checkpoint` with the rematerialization policy of this name.

    Args:
      scanned: True if `body` is the body of a scan.
    """
    if policy == "none" and not gathers_shards():
        return body
    # Inside a scan the loop itself keeps XLA from merging the recomputation with the original.
    return cast(Function, jax.checkpoint(body, policy=POLICIES[policy], prevent_cse=not scanned))
