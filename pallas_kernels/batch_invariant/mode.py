"""The context in which models compute with batch-invariant operations, and their gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

_enabled = jax.make_user_context(False)


def batch_invariant(enabled: bool = True) -> AbstractContextManager[None]:
    """Return a context in which models that are traced compute with the operations of this package.

    The context is part of jax's tracing cache key, so that a jitted function is traced again within it.
    """
    return _enabled(enabled)


def is_batch_invariant() -> bool:
    """Return True inside of the context `batch_invariant`."""
    return bool(_enabled.value)


def with_gradient_of(usual: Callable[..., Any], invariant: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the values of `invariant` and the gradients of `usual`, equal functions up to rounding.

    The backward pass computes the forward pass of `usual` again where its gradients need that.
    """

    @jax.custom_vjp
    def call(*arguments: Any) -> Any:
        return invariant(*arguments)

    def forward(*arguments: Any) -> tuple[Any, tuple]:
        return invariant(*arguments), arguments

    def backward(arguments: tuple, gradient: Any) -> tuple:
        return jax.vjp(usual, *arguments)[1](gradient)

    call.defvjp(forward, backward)
    return call
