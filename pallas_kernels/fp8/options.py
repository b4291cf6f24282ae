"""What all recipes know of a call before its arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fp8Options:
    """The static part of a call.

    Attributes:
        contracted: how many dims are summed over: the last of the input, the first of each weight.
        dtype: of the arguments and their gradients: bfloat16 or float32.
        output: of the results.
        gradients: "e5m2" or "e4m3".
        epsilon: of the RMSNorm that makes the input, where that is to be computed as it is rounded.
    """

    contracted: int
    dtype: str
    output: str
    gradients: str = "e5m2"
    epsilon: float | None = None

    @property
    def no_norm_input_gradients(self) -> tuple[None, ...]:
        """Gradients of what such an input is computed of: they go to the input."""
        return () if self.epsilon is None else (None, None)
