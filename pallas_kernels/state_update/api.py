"""`update_states`: one step of decoding of a recurrent mixer, on states that are kept in slots."""

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.state_update import triton, xla
from pallas_kernels.state_update.request import make_request

BACKENDS = (
    Backend(
        "triton",
        "is one kernel, which reads and writes each state once, in place; XLA copies the rows and passes over them",
        triton.unsupported_reason,
        triton.update,
        opaque=True,
    ),
    Backend("xla", "every call on every device", lambda request: None, xla.update),
)


def update_states(
    states: Float[AnyArray, "S N a b"],
    slots: Int[AnyArray, " R"],
    q: Float[AnyArray, "R K D"],
    k: Float[AnyArray, "R K D"],
    v: Float[AnyArray, "R N V"],
    log_decay: Float[AnyArray, "R N"] | Float[AnyArray, "R N D"],
    beta: Float[AnyArray, "R N"] | None = None,
    *,
    begins: Bool[AnyArray, " R"],
    key_axis: int = 2,
    implementation: str | None = None,
) -> tuple[Float[Array, "R N V"], Float[Array, "S N a b"]]:
    """Add one token to the state of each row; return the tokens' outputs, and the states.

    For each value head, S <- e^log_decay S; S <- S + k n^T; out = S^T q, where n is v, as in Mamba-2, or with
    `beta` the correction beta (v - S^T k) of the gated delta rule, see `gated_delta_rule`. All sums are float32. A step
    is bound by memory: a state has D V numbers, of which each takes part in a few operations.

    Args:
        states: the states of all slots [S, N, D, V] in float32. They are updated in place if the caller does not use
            them afterwards; inside `jax.jit` that needs them to be donated.
        slots: slot of each row. That of a row of padding is S or more: its state is not written, and its output has no
            meaning. No two rows have the same slot below S.
        q, k: queries and keys [R, K, D]; value head n uses key head n // (N // K).
        v: values [R, N, V].
        log_decay: logarithms of the share of the state that is kept, [R, N], or [R, N, D] for each key channel.
        beta: how much of the difference is corrected; None: v is added as it is.
        begins: True for a row whose sequence begins: its state is zeros, whatever the slot has.
        key_axis: 2, or 3 for states [S, N, V, D].
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call.

    Returns:
        out [R, N, V] in the dtype of v, and the states.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    request = make_request(states, slots, begins, q, k, v, log_decay, beta, key_axis=key_axis)
    return select("update_states", BACKENDS, implementation, request).call(request)
