"""`paged_attention`: attention of each sequence's newest tokens over a KV cache that is stored in pages."""

from jaxtyping import Array, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.low_bits.encoded import Encoded
from pallas_kernels.paged_attention import triton, xla
from pallas_kernels.paged_attention.request import make_request

BACKENDS = (
    Backend(
        "triton",
        "reads each page once; for few new tokens",
        triton.unsupported_reason,
        triton.attend,
        opaque=True,
    ),
    Backend("xla", "copies the pages of each sequence together, on every device", xla.unsupported_reason, xla.attend),
)


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P page K H"] | Encoded,
    v_pages: Float[Array, "P page K H"] | Encoded | int,
    page_table: Int[AnyArray, "B pages"],
    lengths: Int[AnyArray, " B"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[AnyArray, " N"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """Compute causal attention of each sequence's last T tokens over its keys and values, stored in pages.

    Args:
        q: queries of the tokens at the positions lengths - T .. lengths - 1. Those before position 0 are padding, whose
            outputs have no meaning.
        k_pages, v_pages: the pages of all sequences, which hold the keys and values of the queries' tokens too; plain
            arrays, or `Encoded` in few bits. A number V as `v_pages`: values are the first V channels of their keys, as
            in absorbed latent attention (DeepSeek-V2, arXiv:2405.04434).
        page_table: int32 pages of each sequence in order; entries after the last page are ignored but must be valid.
        lengths: int32 tokens of each sequence, the T new ones included.
        scale: factor of the scores; default 1 / sqrt(H).
        soft_cap: cap c of the scores, c tanh(score / c).
        window: keys that a query sees, itself included; None: all before it.
        sinks: attention sinks [N], as in `flash_attention`; None: there are none.
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call.

    Returns:
        out [B, T, N, V] in the dtype of q.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    request = make_request(
        q,
        k_pages,
        v_pages,
        page_table,
        lengths,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        sinks=sinks,
    )
    return select("paged_attention", BACKENDS, implementation, request).call(request)


def reads_pages_in_place(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P page K H"] | Encoded,
    v_pages: Float[Array, "P page K H"] | Encoded,
    page_table: Int[AnyArray, "B pages"],
    lengths: Int[AnyArray, " B"],
) -> bool:
    """Return True if paged attention would compute this call by a kernel that does not copy the pages."""
    request = make_request(q, k_pages, v_pages, page_table, lengths, scale=None, soft_cap=None, window=None)
    return select("paged_attention", BACKENDS, None, request, record=False).opaque
