"""The AdEMAMix optimizer: AdamW with a second, slow momentum."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from jaxstack.optim.base import Optimizer, RunInfo


class AdEMAMix(Optimizer):
    """AdamW with a second, slow momentum (Pagliardini et al. 2024, arXiv:2409.03137). State: three float32 per weight.

    The weight of the slow momentum and its decay rate rise over the run, or over `ramp_steps`.
    """

    name: Literal["ademamix"] = "ademamix"
    weight_decay: float = Field(default=0.1, ge=0)
    b1: float = Field(default=0.9, gt=0, lt=1)
    b2: float = Field(default=0.95, ge=0, lt=1)
    b3: float = Field(default=0.9999, gt=0, lt=1)
    """Final decay rate of the slow momentum; smaller for runs of a few thousand steps (0.999)."""
    alpha: float = Field(default=8.0, ge=0)
    """Final weight of the slow momentum."""
    ramp_steps: int | None = Field(default=None, ge=0)
    """Steps over which `alpha` and `b3` rise; 0: they are constant. Default: the length of the run."""
    eps: float = Field(default=1e-8, gt=0)

    def core(self, run: RunInfo) -> optax.GradientTransformation:
        steps = run.total_steps if self.ramp_steps is None else self.ramp_steps
        if not steps:
            return optax.contrib.scale_by_ademamix(self.b1, self.b2, self.b3, self.alpha, self.eps)

        # Optax calls both with the number of steps before this one; the paper counts this one too.
        def b3(count):
            return self._b3((count + 1) / steps)

        def alpha(count):
            return self._alpha((count + 1) / steps)

        return optax.contrib.scale_by_ademamix(self.b1, self.b2, b3, alpha, self.eps)

    def _alpha(self, progress: jax.typing.ArrayLike) -> jax.Array:
        return self.alpha * jnp.minimum(progress, 1.0)

    def _b3(self, progress: jax.typing.ArrayLike) -> jax.Array:
        """Return the slow momentum's decay rate; its half-life rises linearly with `progress` from that of b1 to b3."""
        start = math.log(self.b1)
        end = math.log(self.b3)
        share = jnp.minimum(progress, 1.0)
        return jnp.minimum(jnp.exp(start * end / ((1 - share) * end + share * start)), self.b3)
