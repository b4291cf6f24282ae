"""Sparse attention: a sliding window with global tokens (Longformer), and any pattern of blocks.

Both use the backends of `flash_attention`: the mask is data, and the tiles that it hides are skipped.
"""

import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention.api import BACKENDS
from pallas_kernels.attention.masks import Layout, Mask
from pallas_kernels.attention.request import SegmentIds, check_window, is_static_integer, make_request
from pallas_kernels.dispatch import select

_BLOCK_MULTIPLE = 16


def longformer_attention(
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B S K H"],
    v: Float[AnyArray, "B S K H"],
    *,
    window: int,
    global_tokens: int,
    causal: bool = True,
    segment_ids: SegmentIds | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Compute attention in a sliding window with global tokens (Longformer, Beltagy et al., arXiv:2004.05150).

    Key s is visible to a query at position p if one of these holds, and with `causal` also s <= p:
        they are near: p - window < s < p + window;
        one of them is a global token: s < global_tokens or p < global_tokens.
    So the window extends to both sides without `causal`, and to the left with it. Queries are aligned with keys as in
    `flash_attention`. With `segment_ids` tokens of other documents are hidden as well, and the global tokens are the
    first `global_tokens` of each document: the result for a document does not depend on the others.

    Args:
        q: queries [B, T, N, H] in bfloat16, float16, float32 or float64.
        k, v: keys and values [B, S, K, H] of the same dtype. N is a multiple of K: query head n reads key head
            n // (N // K).
        window: number of keys that a query sees on one side, itself included.
        global_tokens: number of global tokens; 0 for none.
        causal: True to hide keys after the query.
        segment_ids: integers, (query [B, T], key [B, S]), or one array for both. With global tokens, T = S is required
            and the tokens of a document must be contiguous.
        scale: factor of the scores; default 1 / sqrt(H).
        return_lse: True to return the log-sum-exp of the scores too; its cotangent is honoured.
        implementation: name of a backend in `api.BACKENDS`; None takes the first that supports the call.

    Returns:
        out [B, T, N, H] in the dtype of q; with `return_lse` also lse [B, N, T] in float32 (natural logarithm).

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    window = check_window(window)
    if not is_static_integer(global_tokens) or global_tokens < 0:
        raise ValueError(f"global_tokens must be a Python integer of at least 0; got {global_tokens!r}")
    mask = Mask(bool(causal), window, None if causal else window, int(global_tokens))
    request = make_request(
        q, k, v, mask=mask, segment_ids=segment_ids, scale=scale, soft_cap=None, return_lse=return_lse
    )
    out, lse = select("longformer_attention", BACKENDS, implementation, request).call(request)
    return (out, lse) if return_lse else out


def block_sparse_attention(
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B S K H"],
    v: Float[AnyArray, "B S K H"],
    *,
    layout: Bool[np.ndarray, "blocks blocks"],
    block_size: int,
    causal: bool = True,
    segment_ids: SegmentIds | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Compute attention only between those blocks of queries and keys that a boolean pattern allows.

    Queries are aligned with keys as in `flash_attention`: with T < S the last rows of the layout are used. The layout
    covers the whole row; with `segment_ids` tokens of other documents are hidden as well. A query that sees no key, as
    in an empty row of the layout, has the output 0, the log-sum-exp -inf and no gradient.

    Args:
        q: queries [B, T, N, H] in bfloat16, float16, float32 or float64, T <= S.
        k, v: keys and values [B, S, K, H] of the same dtype. N is a multiple of K: query head n reads key head
            n // (N // K).
        layout: boolean numpy array [blocks, blocks], blocks = S / block_size rounded up, the same for all heads. See
            `patterns` for ready ones.
        block_size: number of tokens per block, a multiple of 16. The faster kernels visit tiles of 128 x 128: layouts
            whose visible blocks fill such tiles are the fastest.
        causal, segment_ids, scale, return_lse: as in `flash_attention`.
        implementation: name of a backend in `api.BACKENDS`; None takes the first that supports the call.

    Returns:
        out [B, T, N, H] in the dtype of q; with `return_lse` also lse [B, N, T] in float32 (natural logarithm).

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    mask = Mask(bool(causal), layout=make_layout(layout, block_size, k.shape[1]))
    if q.shape[1] > k.shape[1]:
        raise ValueError(f"a layout covers the positions of the keys: T {q.shape[1]} must not exceed S {k.shape[1]}")
    request = make_request(
        q, k, v, mask=mask, segment_ids=segment_ids, scale=scale, soft_cap=None, return_lse=return_lse
    )
    out, lse = select("block_sparse_attention", BACKENDS, implementation, request).call(request)
    return (out, lse) if return_lse else out


def make_layout(pattern: np.ndarray, block_size: int, key_length: int) -> Layout:
    """Check that a boolean block-sparse pattern covers `key_length` keys, and return it in hashable form.

    Raises:
        ValueError: the array or the block size breaks a rule.
    """
    if not is_static_integer(block_size) or block_size < 1 or block_size % _BLOCK_MULTIPLE:
        raise ValueError(
            f"block_size must be a multiple of {_BLOCK_MULTIPLE}, known while tracing; got {block_size!r}; "
            f"the kernels' tiles are multiples of it"
        )
    if isinstance(pattern, Tracer):
        raise ValueError("layout must be known while tracing: give a numpy array, not an argument of a jitted function")
    array = np.asarray(pattern)
    blocks = -(-key_length // block_size)
    if array.shape != (blocks, blocks):
        raise ValueError(
            f"layout must have shape [{blocks}, {blocks}], S / block_size = {key_length} / {block_size} rounded up; "
            f"got {list(array.shape)}"
        )
    if array.dtype != bool:
        raise ValueError(f"layout must be boolean (True if a block of queries sees a block of keys); got {array.dtype}")
    return Layout.from_pattern(array, int(block_size))
