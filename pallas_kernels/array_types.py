"""Type of arguments that may be jax or NumPy arrays, for operations that convert them to jax arrays."""

import jax
import numpy as np

AnyArray = jax.Array | np.ndarray
