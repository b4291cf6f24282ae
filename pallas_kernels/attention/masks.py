"""Attention masks as hashable data: which keys a query sees, as far as known while tracing (without segment ids).

Query t has position t + S - T, the keys have 0..S-1: the last query is aligned with the last key.
"""

import functools
import operator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Layout:
    """Block-sparse attention pattern: which blocks of keys each block of queries sees, the same for all heads.

    Attributes:
        block_size: number of positions per block.
        blocks: number of rows and of columns of the pattern.
        bits: the pattern row by row, eight entries per byte, so that a layout is hashable.
    """

    block_size: int
    blocks: int
    bits: bytes = field(repr=False)

    @classmethod
    def from_pattern(cls, pattern: np.ndarray, block_size: int) -> "Layout":
        """Create a block-sparse pattern from a boolean array [query blocks, key blocks].

        Entry (i, j) is True if queries of block i see keys of block j.
        """
        return cls(block_size, len(pattern), np.packbits(pattern).tobytes())

    @functools.cached_property
    def pattern(self) -> np.ndarray:
        """The pattern as a boolean array [query blocks, key blocks]."""
        flat = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=self.blocks**2)
        return flat.reshape(self.blocks, self.blocks).astype(bool)

    def __str__(self) -> str:
        return f"{self.pattern.sum()} of {self.blocks}x{self.blocks} blocks of {self.block_size}"


@dataclass(frozen=True)
class Mask:
    """Attention mask as a conjunction of rules: a key is visible if every rule that is set allows it.

    Attributes:
        causal: True if a query sees no key after its position.
        window: a query sees no key `window` or more positions before its own; None for no limit.
        window_after: a query sees no key `window_after` or more positions after its own; None for no limit.
        global_tokens: number of positions at the start that see, and are seen, beyond the windows. With segments these
            are the first of each document.
        layout: a query sees only keys of the blocks that the pattern allows for its own block.
    """

    causal: bool = True
    window: int | None = None
    window_after: int | None = None
    global_tokens: int = 0
    layout: Layout | None = None

    @property
    def is_band(self) -> bool:
        """True if each query sees one contiguous range of keys, limited by `causal` and `window` alone."""
        return self.window_after is None and not self.global_tokens and self.layout is None

    def visible(
        self,
        query_positions: jax.Array,
        key_positions: jax.Array,
        is_global: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array | None:
        """Return which keys each query sees, boolean [..., T, S], or None if every query sees every key.

        Args:
            query_positions: int32 [..., T].
            key_positions: int32 [..., S].
            is_global: which queries [..., T] and keys [..., S] are global tokens; default: those at the first
                `global_tokens` positions.
        """
        distance = query_positions[..., :, None] - key_positions[..., None, :]
        near = [] if self.window is None else [distance < self.window]
        near += [] if self.window_after is None else [distance > -self.window_after]
        if near and self.global_tokens:
            query, key = is_global or (query_positions < self.global_tokens, key_positions < self.global_tokens)
            near = [functools.reduce(operator.and_, near) | query[..., :, None] | key[..., None, :]]
        rules = [*near, *([distance >= 0] if self.causal else [])]
        if self.layout is not None:
            rows = query_positions // self.layout.block_size
            columns = key_positions // self.layout.block_size
            rules.append(jnp.asarray(self.layout.pattern)[rows[..., :, None], columns[..., None, :]])
        return functools.reduce(operator.and_, rules) if rules else None

    def __str__(self) -> str:
        words = ["causal" if self.causal else "full"]
        if self.window is not None:
            words.append(f"window {self.window}")
        if self.window_after is not None:
            words.append(f"window after {self.window_after}")
        if self.global_tokens:
            words.append(f"{self.global_tokens} global tokens")
        if self.layout is not None:
            words.append(str(self.layout))
        return " ".join(words)


def unsupported_unless_band(mask: Mask) -> str | None:
    """Return why a backend that visits one contiguous range of keys per query cannot apply this mask, or None."""
    if mask.is_band:
        return None
    return f"visits one range of keys per query (causal, left window), got: {mask}"
