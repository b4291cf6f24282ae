"""The functions that replace those of jax, to lower Mosaic kernels in less time, return the same results."""

import collections
import pkgutil
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import flash_attention, lowering_platform
from pallas_kernels.mosaic_api import speed_up_lowering

REPLACED = (("constraints", "compute_transitively_equal_vars"), ("layouts", "from_layout_attr"))


def without_order(result: Any) -> Any:
    return {key: set(others) for key, others in result.items()} if isinstance(result, dict) else result


@pytest.mark.skipif(
    jax.__version_info__[:2] != (0, 11), reason="our Hopper kernels need jax 0.11, whose functions these are"
)
def test_functions_replaced_in_jax_agree_with_the_original_ones(monkeypatch):
    speed_up_lowering()
    calls = collections.Counter()

    def compared(name, fast):
        def both(argument):
            calls[name] += 1
            result = fast(argument)
            assert without_order(result) == without_order(fast.__wrapped__(argument))
            return result

        return both

    for module, name in REPLACED:
        path = f"jax.experimental.mosaic.gpu.{module}.{name}"
        monkeypatch.setattr(path, compared(name, pkgutil.resolve_name(path)))
    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    with lowering_platform("cuda"):
        traced = jax.jit(lambda q, k, v: flash_attention(q, k, v, implementation="mosaic")).trace(q, q, q)
        traced.lower(lowering_platforms=("cuda",))
    assert all(calls[name] for _, name in REPLACED)
