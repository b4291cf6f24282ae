"""Loss functions as sums with item counts, so that parts of a batch on any devices combine into an exact mean.

A loss function is called `loss(model, batch, key=key, train=train)`. It may leave out `key` and `train`: each is passed
only if the function names it. It returns a scalar, the mean over its batch, or a `LossSum`; or a pair of either and a
dict of further values for the metrics, each a scalar (a mean) or a `LossSum`.
"""

import dataclasses
import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.models.dropout import TOKEN_KEYS
from jaxstack.models.layer_sums import LayerSums, Sums, add_sums, total_loss
from jaxstack.models.moe.router import ROUTER, RouterSums
from jaxstack.models.transformer import Transformer
from jaxstack.parallel import with_local_batch
from pallas_kernels import linear_cross_entropy, linear_cross_entropy_sum
from pallas_kernels.batch_invariant.cross_entropy import invariant_cross_entropy
from pallas_kernels.batch_invariant.mode import is_batch_invariant

IGNORE = -100
"""Label of a position that does not count."""

Batch = Mapping[str, jax.Array]
"""The arrays of a batch, whose first dims are equal."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSum:
    """The sum of a loss over `count` items (such as tokens), so that parts of a batch add up to an exact mean."""

    total: jax.Array
    """[] float32."""
    count: jax.Array
    """[] float32."""
    further: Mapping[str, "LossSum | Sums"] = dataclasses.field(default_factory=dict)
    """Sums of further values for the metrics, by name; they have no gradient."""

    def without_further(self) -> "LossSum":
        """Return the sum of the loss alone."""
        return LossSum(self.total, self.count)

    def metrics(self, name: str) -> dict[str, jax.Array]:
        """Return the mean as a metric of a step."""
        return {name: self.total / jnp.maximum(self.count, 1.0)}


Value: TypeAlias = jax.typing.ArrayLike | LossSum
LossFunction = Callable[..., Value | tuple[Value, Mapping[str, Value]]]
"""A user's loss: `loss(model, batch)`, and `key` or `train` as keywords if it names them."""


class MeanLoss(Exception):
    """Raised while a step is traced: the loss function returned a mean, but was called on a part of a batch."""


RESERVED = ("loss", "grad_norm", "count", "skipped", "learning_rate", "loss_limit", "grad_norm_limit", "step", "tokens")
"""Metrics of a train step, whose names further values cannot have."""
_Function = TypeVar("_Function", bound=LossFunction)
_KEYWORDS = ("key", "train")
_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""JAX's errors about an array whose value is not known while the step is traced."""


def samples_labels(sampled: LossFunction) -> Callable[[_Function], _Function]:
    """Decorator that attaches to a loss function its variant with labels sampled from the model.

    Optimizers with a second gradient (`jaxstack.optim.base.SampledGradient`) need it.

    Args:
      sampled: `sampled(model, batch, key=key)`, which ignores the batch's labels except where they do not count.
    """

    def declare(function: _Function) -> _Function:
        setattr(function, "sampled", sampled)  # noqa: B010
        return function

    return declare


class Loss:
    """Wraps any loss function so that it takes the same arguments and returns a `LossSum`.

    Args:
      function: `function(model, batch)`; it gets `key` and `train` as well if it has parameters of these names, or
        takes any keyword (`**kwargs`).

    Raises:
      TypeError: the function cannot be called in this way.
    """

    def __init__(self, function: LossFunction):
        self._function = function
        self._keywords = _accepted_keywords(function)
        while isinstance(function, functools.partial):
            function = function.func
        sampled = getattr(function, "sampled", None)
        self.sampled = None if sampled is None else Loss(sampled)
        """The loss on sampled labels, if the function was declared with `samples_labels`."""

    def __call__(
        self, model: nnx.Module, batch: Batch, *, key: jax.Array | None, train: bool, part: bool = False
    ) -> LossSum:
        """Compute the loss of a batch, as a sum and an item count.

        Args:
          model: the model.
          batch: the batch, or a part of it.
          key: random key of this batch; None in evaluation.
          train: True in a train step, False in evaluation.
          part: True if the batch is a part of one, so that only sums give the exact mean over the whole.

        Raises:
          TypeError: the function returned something else than a loss.
          MeanLoss: `part`, and the function returned a mean.
        """
        given: dict[str, object] = {"key": key, "train": train}
        try:
            value = self._function(model, batch, **{name: given[name] for name in self._keywords})
        except _CONCRETE as error:
            raise TypeError(
                "the loss function and the model are compiled, so that their arrays have no values in Python: no "
                f"float(), int(), .item(), numpy function or `if` may take one. {_place_of(error)}Use jax.numpy, "
                "jnp.where or jax.lax.cond; to print values use jax.debug.print."
            ) from error
        except KeyError as error:
            if error.args and error.args[0] not in batch:
                error.add_note(f"(the batch has the keys {', '.join(map(repr, batch))})")
            raise
        loss = as_loss_sum(value)
        if part and not isinstance(value[0] if isinstance(value, tuple) else value, LossSum):
            raise MeanLoss
        return loss


def as_loss(function: "LossFunction | Loss") -> Loss:
    """Wrap a user's loss function as a `Loss`, unless it already is one.

    Raises:
      TypeError: as `Loss`.
    """
    return function if isinstance(function, Loss) else Loss(function)


def _accepted_keywords(function: LossFunction) -> tuple[str, ...]:
    """Return which of the keyword arguments `key` and `train` a loss function takes.

    Raises:
      TypeError: the function does not take (model, batch), or requires something else.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise TypeError(
            f"loss_fn ({function!r}) must be a Python function `loss(model, batch)`, so that its parameters can be "
            "read; wrap it: lambda model, batch: ..."
        ) from None
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = [p for p in parameters if p not in positional[:2] and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in others if p.default is p.empty and (p.name not in _KEYWORDS or p.name not in named)]
    takes_two = len(positional) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not takes_two or required:
        raise TypeError(
            "a loss function is called loss(model, batch), with key=... and train=... if it has parameters of these "
            f"names; this one takes ({', '.join(str(p) for p in parameters)})."
        )
    variadic = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return tuple(name for name in _KEYWORDS if variadic or name in [p.name for p in others])


def sampled_label_loss(model: Transformer, batch: Batch, *, key: jax.Array | None = None) -> LossSum:
    """Return the cross-entropy on labels sampled from the model's own predictions, summed over tokens.

    Args:
      model: the model.
      batch: as in `language_model_loss`; tokens whose label is -100 do not count.
      key: key of the samples, unless the batch has `dropout_keys` [B, T], so that they do not depend on the layout.
    """
    inputs = {name: batch.get(name) for name in ("positions", "segment_ids", "experts")}
    hidden = model.hidden(batch["tokens"], **inputs)
    keys = batch.get(TOKEN_KEYS)
    if keys is None:
        assert key is not None, "a train step passes a key"
        keys = jax.random.split(key, hidden.shape[:2])
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(keys)
    labels = jnp.where(batch["labels"] == IGNORE, IGNORE, _sample_labels(model, hidden, uniform))
    with jax.named_scope("loss"):
        total = vocabulary_loss(model, hidden, labels, 0.0)
    return LossSum(total, _count_labels(labels))


def _sample_labels(model: Transformer, hidden: jax.Array, uniform: jax.Array) -> jax.Array:
    """Sample a label for each token from the model's predictions, using the uniform numbers `uniform` [B, T]."""

    def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, u = row
        shares = jnp.cumsum(jax.nn.softmax(model.logits(x), axis=-1), axis=-1)
        found = jnp.sum(shares < u[:, None] * shares[:, -1:], axis=-1, dtype=jnp.int32)
        return jnp.minimum(found, shares.shape[-1] - 1)

    return jax.lax.stop_gradient(jax.lax.map(of_row, (jax.lax.stop_gradient(hidden), uniform)))


def vocabulary_loss(model: Transformer, hidden: jax.Array, labels: jax.Array, z_loss: float) -> jax.Array:
    """Compute the summed cross-entropy of tokens from hidden states, in chunks if the logits would be large."""

    def loss_of_rows(weight: jax.Array, hidden: jax.Array, labels: jax.Array) -> jax.Array:
        cap = model.config.final_logit_softcapping
        total = linear_cross_entropy_sum(hidden, weight, labels, ignore_index=IGNORE, z_loss=z_loss, soft_cap=cap)
        return total[None, None]

    stored = model.stored_output_weight()
    return jnp.sum(with_local_batch(loss_of_rows, stored, model.dtype, hidden, labels, as_stored=True))


def token_losses(
    model: Transformer, hidden: jax.Array, labels: jax.Array, most: int | None = None, temperature: float = 1.0
) -> jax.Array:
    """Compute the cross-entropy of each token, [B, T] float32, 0 where the label is -100, from hidden states.

    Args:
      model: the model, whose output head is used.
      hidden: final hidden states [B, T, D].
      labels: int32 [B, T].
      most: the labels of a row other than -100 are among `most` consecutive ones, so that only these are computed;
        None: they may be anywhere.
      temperature: divisor of the logits, after their cap.
    """
    cap = model.config.final_logit_softcapping
    options: dict[str, Any] = {"ignore_index": IGNORE, "soft_cap": cap}
    cross_entropy = linear_cross_entropy
    if is_batch_invariant():
        cross_entropy = functools.partial(invariant_cross_entropy, temperature=temperature)
    elif temperature != 1:
        hidden = hidden / temperature
        options["soft_cap"] = None if cap is None else cap / temperature

    def losses_of_rows(weight: jax.Array, hidden: jax.Array, labels: jax.Array) -> jax.Array:
        length = labels.shape[1]
        if most is None or most >= length:
            return cross_entropy(hidden, weight, labels, **options)
        first = jnp.minimum(jnp.argmax(labels != IGNORE, axis=1), length - most)
        labels = _window(labels, first, most)
        losses = cross_entropy(_cut_window(hidden, first, most), weight, labels, **options)
        return _outside_zero(losses, first, length)

    return with_local_batch(losses_of_rows, model.stored_output_weight(), model.dtype, hidden, labels, as_stored=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cut_window(x: Float[Array, "B T D"], first: Int[Array, " B"], length: int) -> Float[Array, "B L D"]:
    """Return `length` consecutive vectors of each row, from `first` on.

    The gradient copies, where JAX's own would add each number to zeros with an atomic operation.
    """
    return _window(x, first, length)


def _window(x: jax.Array, first: jax.Array, length: int) -> jax.Array:
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, length))(x, first)


def _outside_zero(x: jax.Array, first: jax.Array, length: int) -> jax.Array:
    """Return rows of `length` that have the rows of x from `first` on, and zeros elsewhere."""
    zeros = jnp.zeros((x.shape[0], length - x.shape[1], *x.shape[2:]), x.dtype)
    return _window(jnp.concatenate([zeros, x, zeros], axis=1), zeros.shape[1] - first, length)


def _cut_window_forward(x: jax.Array, first: jax.Array, length: int) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return _window(x, first, length), (first, x.shape[1])


def _cut_window_backward(length: int, kept: tuple[jax.Array, int], gradient: jax.Array) -> tuple[jax.Array, None]:
    del length
    return _outside_zero(gradient, *kept), None


_cut_window.defvjp(_cut_window_forward, _cut_window_backward)


@samples_labels(sampled_label_loss)
def language_model_loss(
    model: Transformer,
    batch: Batch,
    *,
    key: jax.Array | None = None,
    train: bool = False,
    z_loss: float = 0.0,
    mtp_weight: float = 0.3,
) -> LossSum:
    """Return the next-token cross-entropy in nats, summed over the tokens whose label is not -100.

    Args:
      model: the model.
      batch: `tokens`, `labels` int32 [B, T]; optionally `segment_ids`, `positions` int32 [B, T], and `experts`, see
        `Transformer.hidden`.
      key: key of the dropout masks, unless the batch has `dropout_keys` [B, T], which a train step adds so that masks
        do not depend on the layout; None: no dropout.
      train: True adds the layers' own losses, such as those of routers, of multi-token prediction, and the z-loss.
      z_loss: weight of log(Z)^2, which keeps the softmax normaliser near 1 (Chowdhery et al. 2022).
      mtp_weight: weight of multi-token prediction, see `add_mtp_loss`.
    """
    hidden, sums = model.hidden_and_sums(
        batch["tokens"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        dropout_key=None if key is None else batch.get(TOKEN_KEYS, key),
        experts=batch.get("experts"),
        with_losses=train,
    )
    z_loss = z_loss if train else 0.0

    with jax.named_scope("loss"):
        total = vocabulary_loss(model, hidden, batch["labels"], z_loss)
    loss = LossSum(total, _count_labels(batch["labels"]))
    loss = add_layer_losses(loss, sums) if train else loss
    return add_mtp_loss(loss, model, hidden, batch, key=key, weight=mtp_weight) if train else loss


def add_layer_losses(loss: LossSum, sums: LayerSums, scale: float | jax.Array = 1.0) -> LossSum:
    """Add the layers' own losses, such as those of routers, to a loss, and their sums to its further values.

    Args:
      loss: of the same tokens.
      sums: from `Transformer.hidden_and_sums`; sums of the same names that the loss has already are added to them.
      scale: factor of the layers' losses, which are sums over tokens.
    """
    if not sums:
        return loss
    shown: LayerSums = dict(sums)
    if ROUTER in sums:
        shown = {**sums, ROUTER: cast(RouterSums, sums[ROUTER])._replace(experts=None)}
    known = cast(LayerSums, {name: value for name, value in loss.further.items() if name in sums})
    further = {**loss.further, **add_sums(jax.lax.stop_gradient(shown), known)}
    return LossSum(loss.total + scale * total_loss(sums), loss.count, further)


def add_mtp_loss(
    loss: LossSum, model: Transformer, hidden: jax.Array, batch: Batch, *, key: jax.Array | None, weight: float
) -> LossSum:
    """Add the loss of the model's multi-token prediction, if it has one, to that of the next tokens.

    As in the report of DeepSeek-V3 each prediction layer's cross-entropies are summed, and divided by the number of
    next tokens; `mtp_loss` among the further values is the mean per predicted token, over all layers.

    Args:
      loss: of the next tokens.
      model, batch, key: as in `language_model_loss`.
      hidden: final hidden states [B, T, D].
      weight: factor of the mean over the layers; 0 leaves the loss as it is.
    """
    if model.mtp is None or not weight:
        return loss
    inputs = {name: batch.get(name) for name in ("positions", "segment_ids")}
    embed = functools.partial(model.inputs_of_layers, **inputs)
    key = None if key is None else batch.get(TOKEN_KEYS, key)
    total = loss.total
    sums = LossSum(jnp.zeros(()), jnp.zeros(()))
    with jax.named_scope("mtp"):
        for prediction in model.mtp(hidden, batch, embed, key, IGNORE):
            entropy = vocabulary_loss(model, prediction.hidden, prediction.labels, 0.0)
            sums = LossSum(sums.total + entropy, sums.count + _count_labels(prediction.labels))
            total += prediction.layer_loss
    total += weight / len(model.mtp.layers) * sums.total
    return LossSum(total, loss.count, {**loss.further, "mtp_loss": jax.lax.stop_gradient(sums)})


def _count_labels(labels: jax.Array) -> jax.Array:
    return jnp.sum(labels != IGNORE, dtype=jnp.float32)


def as_loss_sum(value: object) -> LossSum:
    """Convert the result of a loss function to a `LossSum` of float32 scalars; a mean counts as one item.

    Raises:
      TypeError: it is neither a scalar, nor a LossSum, nor one of these with a dict of further values.
    """
    further: object = {}
    if isinstance(value, tuple):
        if len(value) != 2:
            raise TypeError(
                f"a loss function returns a loss, or a pair (loss, further values); found {len(value)} values."
            )
        value, further = value
        if not isinstance(further, Mapping) or not all(isinstance(name, str) for name in further):
            raise TypeError(
                "a loss function returns a scalar or jaxstack.loss.LossSum(total, count), or a pair of either and "
                f"further values, which must be a dict {{name: scalar or LossSum}}; found {_kind(further)}."
            )
    assert isinstance(further, Mapping)
    if taken := sorted(set(further) & set(RESERVED)):
        raise TypeError(f"the further value {taken[0]!r} of the loss function has the name of a metric of the step.")
    sums = {
        str(name): _one_sum(
            x,
            f"the further value {name!r} of the loss function must be a real scalar or a LossSum; it is",
        )
        for name, x in further.items()
    }
    loss = _one_sum(
        value,
        "a loss function must return a real scalar (the mean over its batch) or jaxstack.loss.LossSum(total, count); "
        "it returned",
    )
    sums = jax.lax.stop_gradient(sums)
    return LossSum(loss.total, loss.count, {**value.further, **sums} if isinstance(value, LossSum) else sums)


def _one_sum(value: object, rule: str) -> LossSum:
    """Convert a scalar or a LossSum to a LossSum of float32 scalars; `rule` begins the error about anything else."""
    if isinstance(value, LossSum):
        return LossSum(jnp.asarray(value.total, jnp.float32), jnp.asarray(value.count, jnp.float32))
    shape = getattr(value, "shape", () if isinstance(value, int | float) else None)
    if shape != () or jnp.iscomplexobj(value):
        raise TypeError(f"{rule} {_kind(value)}.")
    return LossSum(jnp.asarray(cast(jax.typing.ArrayLike, value), jnp.float32), jnp.ones((), jnp.float32))


def _kind(value: object) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(value, jax.Array):
        return f"an array of shape {shape} and dtype {value.dtype}"
    return f"{type(value).__name__}{f' of shape {shape}' if shape is not None else ''}"


def _place_of(error: BaseException) -> str:
    """Return a sentence that names the line of the user's code where an error arose; empty if unknown."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    own = [frame for frame in frames if frame.filename != __file__]
    return f"It is in {own[-1].filename}, line {own[-1].lineno}: `{own[-1].line}`. " if own else ""
