"""Array types of arguments: operations that convert their arguments to jax arrays take numpy arrays too."""

import jax
import numpy as np

AnyArray = jax.Array | np.ndarray
