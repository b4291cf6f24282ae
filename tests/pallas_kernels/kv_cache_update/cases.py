"""Arguments of `rotate_into_cache` for its tests, and its result by loops over tokens and heads."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of a call: B rows of T new tokens with N query heads, and a cache of K heads and S slots."""

    batch: int = 2
    length: int = 1
    heads: int = 4
    key_heads: int = 2
    width: int = 32
    slots: int = 12
    slot_axis: int = 2
    shared_angles: bool = False
    dtype: str = "float16"
    cache_dtype: str | None = None
    scale: float = 1.0
    """Size of the new heads: with 200 some are more than the largest number of FP8."""

    def arguments(self) -> tuple[np.ndarray, ...]:
        """`joined`, `cos`, `sin`, `keys`, `values` and `slots`, of which one slot in four is past the last."""
        random = np.random.default_rng(0)
        joined = random.normal(size=(self.batch, self.length, self.heads + 2 * self.key_heads, self.width))
        angles = random.uniform(0, 6, (1 if self.shared_angles else self.batch, self.length, self.width // 2))
        dims = (self.slots, self.key_heads) if self.slot_axis == 1 else (self.key_heads, self.slots)
        cache = random.normal(size=(2, self.batch, *dims, self.width))
        slots = np.stack([random.permutation(self.slots)[: self.length] for _ in range(self.batch)])
        slots.reshape(-1)[::4] = self.slots + np.arange(slots.size)[::4]
        dtype = _dtype(self.dtype)
        cos = np.cos(angles).astype(np.float32)
        sin = np.sin(angles).astype(np.float32)
        return (
            (self.scale * joined).astype(dtype),
            cos,
            sin,
            *cache.astype(_dtype(self.cache_dtype) or dtype),
            slots.astype(np.int32),
        )

    def options(self) -> dict[str, int]:
        """The keyword arguments of the call."""
        return {"num_heads": self.heads, "slot_axis": self.slot_axis}


CASES = {
    "contiguous": Case(batch=3),
    "paged": Case(batch=1, length=7, slot_axis=1),
    "several_tokens": Case(length=5),
    "shared_angles": Case(length=3, shared_angles=True),
    "one_key_head": Case(heads=3, key_heads=1, width=64),
    "as_many_key_heads": Case(heads=3, key_heads=3, slot_axis=1),
    "odd_width": Case(width=20),
    "wide": Case(batch=1, length=3, heads=2, key_heads=1, width=1024),
    "float32": Case(length=2, dtype="float32"),
    "bfloat16": Case(length=2, dtype="bfloat16"),
    "narrower_cache": Case(length=2, dtype="float32", cache_dtype="float16"),
    "fp8_cache": Case(length=2, dtype="float16", cache_dtype="float8_e4m3fn", scale=200.0),
}


def expected(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rotated queries, and the cache with the new tokens, of the case's arguments."""
    joined, cos, sin, *cache, slots = case.arguments()
    half = case.width // 2
    wide = joined.astype(np.float32)
    cos, sin = (np.broadcast_to(x, (case.batch, *x.shape[1:]))[:, :, None] for x in (cos, sin))
    first = wide[..., :half]
    second = wide[..., half:]
    rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    n = case.heads
    k = case.key_heads
    q = rotated[:, :, :n].astype(joined.dtype)
    new = (rotated[:, :, n : n + k], wide[:, :, n + k :])
    for old, added in zip(cache, new, strict=True):
        for row, token in np.ndindex(slots.shape):
            slot = slots[row, token]
            for head in range(k * (slot < case.slots)):
                place = (row, slot, head) if case.slot_axis == 1 else (row, head, slot)
                exact = added[row, token, head].astype(joined.dtype).astype(np.float32)
                old[place] = np.clip(exact, -448, 448) if old.dtype.itemsize == 1 else exact
    return q, *cache


def assert_equal(found: tuple[Any, ...], wanted: tuple[Any, ...], case: Case) -> None:
    """Assert that results are equal up to the order of rounding, one unit in the last place of the narrowest dtype."""
    for one, other in zip(found, wanted, strict=True):
        one = np.asarray(one)
        other = np.asarray(other)
        assert one.dtype == other.dtype and one.shape == other.shape
        unit = {"float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7, "float8_e4m3fn": 2**-3}[str(one.dtype)]
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=unit, atol=2e-6)


def _dtype(name: str | None) -> Any:
    """numpy's dtype of that name, which for bfloat16 is jax's."""
    import jax.numpy as jnp

    return None if name is None else jnp.dtype(name)
