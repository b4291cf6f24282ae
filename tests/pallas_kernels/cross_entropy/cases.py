"""Inputs of the fused head and loss, the operation as one writes it plainly, and the bound on errors."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tests.compilation import run_jitted

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
OPTIONS = {
    "plain": {},
    "z_loss_and_cap": {"z_loss": 0.01, "soft_cap": 3.0},
    "large_cap": {"soft_cap": 50.0},
}


def make_inputs(leading: tuple[int, ...], width: int = 8, vocabulary: int = 33, seed: int = 0) -> Inputs:
    """hidden, weight (values that bfloat16 holds), labels (a fifth ignored), and what each token's loss is worth."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, vocabulary, leading)
    labels = np.where(rng.random(leading) < 0.2, -100, labels)
    hidden = np.asarray(jnp.asarray(rng.normal(size=(*leading, width)), jnp.bfloat16), np.float64)
    weight = np.asarray(jnp.asarray(rng.normal(size=(width, vocabulary)), jnp.bfloat16), np.float64)
    return hidden, weight, labels, rng.normal(size=leading)


def plain_losses(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, *, z_loss: float = 0.0, soft_cap: float | None = None
) -> jax.Array:
    """As one writes it in the inputs' precision: logits in that precision, log-softmax in float32."""
    logits = (hidden @ weight).astype(jnp.float32)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(labels == -100, 0.0, lse - chosen + z_loss * lse**2)


def value_and_gradients(function: Callable, inputs: Inputs, dtype: str, factor: float = 1.0) -> list[np.ndarray]:
    """function(hidden, weight, labels, d_loss) -> (total, values): its values, and factor x the gradients of total."""
    hidden, weight, labels, d_loss = inputs

    def total(hidden: jax.Array, weight: jax.Array, d_loss: jax.Array) -> tuple:
        total, values = function(hidden, weight, labels, d_loss)
        return factor * total, values

    arrays = jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype), jnp.asarray(d_loss, jnp.promote_types(dtype, "f4"))
    (_, values), gradients = run_jitted(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True), *arrays)
    return [np.asarray(x, np.float64) for x in (values, *gradients)]


def assert_error_at_most_twice(
    actual: Sequence[np.ndarray], plain: Sequence[np.ndarray], truth: Sequence[np.ndarray], dtype: str
) -> None:
    """The error against `truth` is at most twice that of `plain`: value, d_hidden, d_weight, d_token_weights."""
    names = ("value", "d_hidden", "d_weight", "d_token_weights")
    for name, ours, theirs, exact in zip(names, actual, plain, truth, strict=True):
        size = np.linalg.norm(exact) + 1e-30
        error = np.linalg.norm(ours - exact) / size
        allowed = 2 * np.linalg.norm(theirs - exact) / size
        # With one token either error is a matter of luck, so that a few roundings are always allowed.
        assert error <= max(allowed, 8 * float(jnp.finfo(dtype).eps)), (name, error, allowed)
