"""Names and a policy by which `jax.checkpoint` saves attention's outputs, so that they are not recomputed."""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

OUT_NAME = "flash_attention_out"
LSE_NAME = "flash_attention_lse"
_CUDNN_FORWARD = "dot_product_attention_fwd"


def name_outputs(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Give attention's outputs the names by which a `jax.checkpoint` policy can save them."""
    return checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)


def save_attention(primitive: Primitive, *args: Any, **parameters: Any) -> bool:
    """Return True, as a `jax.checkpoint` policy, for values that attention's backward needs, whichever backend runs.

    Our own backends name their output and log-sum-exp. cuDNN's log-sum-exp has no name: it is the second output of
    jax's primitive, which is recognised by the primitive's name.
    """
    if getattr(primitive, "name", "").startswith(_CUDNN_FORWARD):
        return True
    return jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)(primitive, *args, **parameters)
