"""One bit of one device's copy of an array, flipped."""

import jax
import numpy as np


def flip_copy(x: jax.Array, device: int, bit: int) -> jax.Array:
    """`x` with bit number `bit` of the part on device `device` changed, and no other copy."""
    parts = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            raw = data.reshape(-1).view(np.uint8)
            raw[bit // 8] ^= 1 << bit % 8
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
