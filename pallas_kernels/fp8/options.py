"""`Fp8Options`: static (non-array) arguments that FP8 matmuls take with every scaling recipe."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fp8Options:
    """Static arguments of an FP8 matmul (dtypes, gradient format, ...): hashable, not differentiated.

    Attributes:
        contracted: number of contracted dims: the last of the input, the first of each weight.
        dtype: dtype of the arguments and their gradients, bfloat16 or float32.
        output: dtype of the results.
        gradients: format of the incoming gradients, "e5m2" or "e4m3".
        epsilon: epsilon of the RMSNorm that makes the input, if it is to be computed while the input is quantized.
    """

    contracted: int
    dtype: str
    output: str
    gradients: str = "e5m2"
    epsilon: float | None = None

    @property
    def no_norm_input_gradients(self) -> tuple[None, ...]:
        """The gradients that a backward pass returns for a fused RMSNorm's inputs: (None, None), or () without a norm.

        Each is None, because the gradient goes to the norm's output.
        """
        return () if self.epsilon is None else (None, None)
