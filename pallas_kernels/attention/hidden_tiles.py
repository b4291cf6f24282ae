"""Tells whether the backend of an attention call reads keys that no query sees."""

from jaxtyping import Float

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention.api import BACKENDS
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.request import SegmentIds, check_window, make_request
from pallas_kernels.dispatch import select

_SKIPPING = ("mosaic", "mosaic_deterministic", "triton")
"""Backends that read no tile of keys in which no query sees a key."""


def skips_hidden_tiles(
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B S K H"],
    v: Float[AnyArray, "B S K V"],
    segment_ids: SegmentIds,
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> bool:
    """Return True if `flash_attention` of such arrays reads only those tiles of keys in which a query sees a key.

    Keys and values elsewhere may then be anything. Arguments are as in `flash_attention`; only shapes and dtypes count.
    """
    mask = Mask(True, None if window is None else check_window(window))
    request = make_request(
        q, k, v, mask=mask, segment_ids=segment_ids, scale=None, soft_cap=None, return_lse=False, sinks=None
    )
    return select("flash_attention", BACKENDS, implementation, request, record=False).name in _SKIPPING
