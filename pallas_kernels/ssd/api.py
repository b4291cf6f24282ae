"""`ssd`: the state space layer of Mamba-2 by the first backend of a table that supports the call."""

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention.remat import OUT_NAME
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.ssd import mosaic, recurrent, xla
from pallas_kernels.ssd.request import make_request

BACKENDS = (
    Backend(
        "recurrent",
        "one token: reads and writes the state once; the definition that backends are tested against",
        lambda request: None,
        recurrent.compute,
        recurrent.lower_priority_reason,
    ),
    Backend(
        "mosaic",
        "bfloat16 on Hopper: forward and backward in chunks, the state of a head in registers",
        mosaic.unsupported_reason,
        mosaic.compute,
        opaque=True,
    ),
    Backend("xla", "every call on every device, in chunks", lambda request: None, xla.compute),
)


def ssd(
    x: Float[AnyArray, "B T N P"],
    dt: Float[AnyArray, "B T N"],
    a: Float[AnyArray, " N"],
    b: Float[AnyArray, "B T G S"],
    c: Float[AnyArray, "B T G S"],
    *,
    segment_ids: Int[AnyArray, "B T"] | None = None,
    state: Float[AnyArray, "B N P S"] | None = None,
    chunk: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N P"], Float[Array, "B N P S"]]:
    """Compute the state space layer of Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), whose decay is one number a head.

    Each head has a state h [P, S]: h <- exp(dt a) h + dt x b^T, and the output y = h c. Decays, sums and states are
    float32 (float64 for float64 inputs). All arrays have gradients, the state and the returned state too.

    Args:
        x: inputs [B, T, N, P] in bfloat16, float16, float32 or float64.
        dt: step sizes [B, T, N], not negative, best in float32. A token with dt = 0 leaves the state as it is, so that
            padding anywhere in a row is harmless.
        a: [N], negative: the logarithm of the state's decay per unit of dt.
        b, c: [B, T, G, S], what is written to and read from the state, in the dtype of x. N is a multiple of G: head n
            uses group n // (N // G).
        segment_ids: integers [B, T]; at a token whose id differs from the one before it the state begins anew. Negative
            numbers mark padding, whose dt is taken as 0.
        state: the state before the first token, [B, N, P, S], of the same document as that token; None: zeros.
        chunk: number of tokens per chunk; None chooses by P and S.
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call.

    Returns:
        y [B, T, N, P] in the dtype of x, and the state after the last token, float32 [B, N, P, S].

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    request = make_request(x, dt, a, b, c, segment_ids=segment_ids, state=state, chunk=chunk)
    y, last = select("ssd", BACKENDS, implementation, request).call(request)
    return checkpoint_name(y, OUT_NAME), last
