"""The short causal depthwise convolution in front of a recurrence, which restarts at each packed document.

A recurrent token mixer applies it to its queries, keys and values (gated delta rule) or inputs (Mamba-2), each a
`ShortConvolution` with dims of its own: a convolution over joined channels is the same as one for each part.

- training: `convolution(x, segment_ids=ids)`.
- decoding: `convolution(x, tail=tail)` with the raw inputs before the first token, and `next_tail` for the next call.
  Rows with padding are first arranged by `jaxstack.models.attention.slot_cache.padding_last`.
- a part of a sequence that follows another device's part: x with the last W - 1 tokens of the other part in front and
  their `segment_ids`, of which the first W - 1 outputs are dropped.

Dims: B batch, T tokens, W taps; the channels are one dim or several.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.models.layer import SegmentIds
from jaxstack.parallel.rules import KEEP_FLOAT32


class ShortConvolution(nnx.Module):
    """silu(bias + sum_j taps[j] x[t - W + 1 + j]) for each channel: the last tap is that of the newest token.

    Args:
      channels: sizes of the channel dims.
      axes: their logical axes.
      width: number of taps W.
      bias: True if each channel has a bias.
    """

    def __init__(self, channels: tuple[int, ...], axes: tuple[str, ...], width: int, *, rngs: nnx.Rngs, bias: bool):
        taps = jax.random.uniform(rngs.params(), (width, *channels), jnp.float32, -(width**-0.5), width**-0.5)
        self.taps = nnx.Param(taps, logical_axes=(None, *axes), **{KEEP_FLOAT32: True})
        zeros = jnp.zeros(channels, jnp.float32)
        self.bias = nnx.Param(zeros, logical_axes=axes, **{KEEP_FLOAT32: True}) if bias else None

    def __call__(
        self,
        x: Float[Array, "B T *channels"],
        *,
        segment_ids: SegmentIds = None,
        tail: Float[Array, "B tail *channels"] | None = None,
    ) -> Float[Array, "B T *channels"]:
        """Apply the convolution and its activation; see `short_convolution`."""
        bias = None if self.bias is None else self.bias[...]
        return short_convolution(x, self.taps[...], bias, segment_ids=segment_ids, tail=tail)


@jax.checkpoint  # its backward needs only x, not the shifted copies
def short_convolution(
    x: Float[Array, "B T *channels"],
    taps: Float[Array, " W *channels"],
    bias: Float[Array, "*channels"] | None = None,
    *,
    segment_ids: SegmentIds = None,
    tail: Float[Array, "B tail *channels"] | None = None,
) -> Float[Array, "B T *channels"]:
    """Return silu(bias + sum_j taps[j] x[t - W + 1 + j]) in the dtype of x, computed in float32.

    Args:
      x: raw inputs.
      taps: the weights of each channel.
      bias: added to each channel.
      segment_ids: document of each token; no output sees another document. The tokens of a document are contiguous.
      tail: raw inputs of the W - 1 tokens before the first one, of its document; None: zeros.
    """
    width = taps.shape[0]
    length = x.shape[1]
    if tail is None:
        tail = jnp.zeros((x.shape[0], width - 1, *x.shape[2:]), x.dtype)
    padded = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    begins = None
    if segment_ids is not None:
        begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    out = x.astype(jnp.float32) * taps[-1]
    hidden = None
    for back in range(1, width):
        part = padded[:, width - 1 - back :][:, :length].astype(jnp.float32) * taps[-1 - back]
        if begins is not None:
            # A token does not see `back` tokens before it if a document begins at any of the tokens in between.
            began = jnp.pad(begins, ((0, 0), (back - 1, 0)))[:, :length]
            hidden = began if hidden is None else hidden | began
            part = jnp.where(hidden.reshape(*hidden.shape, *(1,) * (x.ndim - 2)), 0, part)
        out = out + part
    return jax.nn.silu(out if bias is None else out + bias).astype(x.dtype)


def next_tail(
    x: Float[Array, "B T *channels"],
    tail: Float[Array, "B tail *channels"],
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B tail *channels"]:
    """Return the raw inputs of the last W - 1 tokens, given those of a call and the tail before it.

    Args:
      x: the raw inputs of the call.
      tail: those of the tokens before it.
      lengths: number of tokens of each row, after which x is padding; None: there is no padding.
    """
    whole = jnp.concatenate([tail, x.astype(tail.dtype)], axis=1)
    if lengths is None:
        return whole[:, x.shape[1] :]
    index = lengths[:, None] + jnp.arange(tail.shape[1])
    return jnp.take_along_axis(whole, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def convolve_and_keep(
    convolutions: Sequence[ShortConvolution],
    inputs: Sequence[Float[Array, "B T ..."]],
    tails: Sequence[Float[Array, "B tail ..."]],
    lengths: Int[Array, " B"],
) -> tuple[list[Float[Array, "B T ..."]], list[Float[Array, "B tail ..."]]]:
    """Apply convolutions while decoding; return their outputs and the tails for the next call.

    Args:
      convolutions: one for each input.
      inputs: raw inputs of this call, with padding at the end.
      tails: those of the tokens before it.
      lengths: number of tokens of each row.
    """
    outputs = [apply(x, tail=tail) for apply, x, tail in zip(convolutions, inputs, tails, strict=True)]
    return outputs, [next_tail(x, tail, lengths) for x, tail in zip(inputs, tails, strict=True)]
