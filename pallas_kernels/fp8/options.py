"""The static part of an FP8 call, which all recipes share."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fp8Options:
    """The static part of a call, hashable.

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
        """The gradients of the inputs of that RMSNorm: None each, as the gradient goes to its output."""
        return () if self.epsilon is None else (None, None)
