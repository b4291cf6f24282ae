"""Names by which `jax.checkpoint` can save the outputs of attention, and the policy that saves them."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

OUT_NAME = "flash_attention_out"
LSE_NAME = "flash_attention_lse"
_CUDNN_FORWARD = "dot_product_attention_fwd"


def name_outputs(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the same arrays, named for the policies of `jax.checkpoint`."""
    return checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)


def save_attention(primitive: Primitive, *args: Any, **parameters: Any) -> bool:
    """Policy for `jax.checkpoint` that saves what the backward of attention needs, whichever backend runs.

    Our own backends name their output and log-sum-exp. cuDNN's log-sum-exp has no name: it is the second output of
    jax's primitive, which is recognised by the primitive's name.
    """
    if getattr(primitive, "name", "").startswith(_CUDNN_FORWARD):
        return True
    return jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)(primitive, *args, **parameters)
