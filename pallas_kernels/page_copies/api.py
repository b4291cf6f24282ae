"""`copy_newest`: the keys and values of sequences in pages, as arrays in which a sequence's tokens lie side by side."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.page_copies import triton, xla
from pallas_kernels.page_copies.request import BLOCK as BLOCK
from pallas_kernels.page_copies.request import make_request

BACKENDS = (
    Backend(
        "triton",
        "its cost is that of the tokens that there are; XLA copies the whole width of the page table",
        triton.unsupported_reason,
        triton.copy,
        opaque=True,
    ),
    Backend("xla", "every call on every device", lambda request: None, xla.copy),
)


def copy_newest(
    keys: Float[AnyArray, "P page K H"],
    values: Float[AnyArray, "P page K V"],
    table: Int[AnyArray, "R W"],
    lengths: Int[AnyArray, " R"],
    *,
    dtype: jax.typing.DTypeLike,
    implementation: str | None = None,
) -> tuple[Float[Array, "R slots K H"], Float[Array, "R slots K V"]]:
    """Copy the keys and values of sequences from their pages, each to the end of a row of W * page slots.

    A row's last slot has its newest token, the slot before that the token before. Slots before the first token hold
    finite numbers, if they are less than `BLOCK` slots away from it, and otherwise anything, NaN too: who reads the
    copies must skip them.

    Args:
        keys, values: the pages of a cache, [P, page, K, H] and [P, page, K, V], of the same dtype.
        table: numbers of each sequence's pages, in the order of its tokens; unused ones are numbers of pages too.
        lengths: number of tokens of each sequence, at most W * page.
        dtype: of the copies.
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call.

    Returns:
        The copies, [R, W * page, K, H] and [R, W * page, K, V].

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    request = make_request(keys, values, table, lengths, dtype)
    return select("copy_newest", BACKENDS, implementation, request).call(request)


def copies_by_kernel(
    keys: Float[AnyArray, "P page K H"],
    values: Float[AnyArray, "P page K V"],
    table: Int[AnyArray, "R W"],
    lengths: Int[AnyArray, " R"],
    *,
    dtype: jax.typing.DTypeLike,
) -> bool:
    """Return True if `copy_newest` of such arrays copies only the tokens that there are; XLA copies all slots."""
    request = make_request(keys, values, table, lengths, dtype)
    return select("copy_newest", BACKENDS, None, request, record=False).name != "xla"
