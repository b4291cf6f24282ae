"""jax's Pallas and its Mosaic GPU interface, untyped: it moves between releases of jax, and this is the one place
to bridge what differs. Our kernels need jax 0.11; on an older one they are refused before anything here is used.
"""

from typing import Any

from jax.experimental import pallas
from jax.experimental.pallas import mosaic_gpu

pl: Any = pallas
plgpu: Any = mosaic_gpu
