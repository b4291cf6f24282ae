"""`gated_delta_rule`: a recurrence over tokens whose state is a matrix of fixed size for each head."""

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention.remat import OUT_NAME
from pallas_kernels.delta_rule import mosaic, recurrent, xla
from pallas_kernels.delta_rule.request import make_request
from pallas_kernels.dispatch import Backend, select

BACKENDS = (
    Backend(
        "recurrent",
        "one token: reads and writes the state once; the definition that backends are tested against",
        lambda request: None,
        recurrent.apply,
        recurrent.lower_priority_reason,
    ),
    Backend(
        "mosaic",
        "Hopper, bfloat16, widths of 64 and 128, one decay a head: kernels whose state stays in registers",
        mosaic.unsupported_reason,
        mosaic.apply,
        mosaic.lower_priority_reason,
        opaque=True,
    ),
    Backend("xla", "every call on every device, in chunks of 64 tokens", lambda request: None, xla.apply),
)


def gated_delta_rule(
    q: Float[AnyArray, "B T K D"],
    k: Float[AnyArray, "B T K D"],
    v: Float[AnyArray, "B T N V"],
    log_decay: Float[AnyArray, "B T N"] | Float[AnyArray, "B T N D"],
    beta: Float[AnyArray, "B T N"],
    *,
    segment_ids: Int[AnyArray, "B T"] | None = None,
    state: Float[AnyArray, "B N D V"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N D V"]]:
    """Compute the gated delta rule (Yang et al., arXiv:2412.06464): fading memory that is corrected for each key.

    For each value head, S <- e^log_decay S; S <- S + k (beta (v - S^T k))^T; out = scale S^T q, after the update. With
    a decay for each key channel, each row of S fades by its own (Kimi Delta Attention, arXiv:2510.26692).
    State, decays and sums are float32 (float64 for float64 inputs). A token with log_decay = 0 and beta = 0 leaves the
    state as it is, so padding needs no other mark.

    Args:
        q, k: queries and keys [B, T, K, D] in bfloat16, float16, float32 or float64; for the rule to be stable, the
            length of a key is at most 1.
        v: values [B, T, N, V] of the same dtype. N is a multiple of K: value head n uses key head n // (N // K).
        log_decay: logarithms of the share of the state that is kept, at most 0: [B, T, N], or [B, T, N, D] for each
            key channel.
        beta: how much of the difference is corrected, 0 to 1 (or to 2).
        segment_ids: integers [B, T]; each document begins with an empty state. The tokens of a document are contiguous:
            the same number after another one is a new document. Negative numbers are padding: the state passes over
            it before the first document.
        state: the state before the first token, of its document; None: zeros.
        scale: factor of the queries; default 1 / sqrt(D).
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call.

    Returns:
        out [B, T, N, V] in the dtype of v, and the state [B, N, D, V] after the last token, of its document.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    request = make_request(q, k, v, log_decay, beta, segment_ids=segment_ids, state=state, scale=scale)
    out, last = select("gated_delta_rule", BACKENDS, implementation, request).call(request)
    return checkpoint_name(out, OUT_NAME), last
