"""A token mixer that is added in one file, with weights, a cache and FLOPs of its own, is counted and served."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.models import ModelConfig, count_parameters
from jaxstack.models.attention.slot_cache import decode_slots
from jaxstack.models.count import model_flops_per_token
from jaxstack.models.initialization import make_initializer
from jaxstack.models.layer import LAYER_TYPES, Layer, LayerType, Mixer, ParameterCount
from jaxstack.models.linear import Linear
from jaxstack.models.mixers import MIXERS
from tests.models.test_layers import SHAPE, make, serve_and_compare


class ShiftMixer(Mixer):
    """Configuration of the mixer that adds a projection of the token before; not shipped."""

    name: str = "shift"
    scale: float = 1.0


class LastInput(NamedTuple):
    """The last input of each row."""

    x: Float[Array, "B D"]


class Shift(nnx.Module):
    """A token mixer with weights, a state and FLOPs of its own: out(x_t + scale in(x_{t-1})); not shipped."""

    def __init__(self, config: ModelConfig, layer: Layer, rngs: nnx.Rngs):
        d = config.hidden_size
        inner = make_initializer(config)
        outer = make_initializer(config, residual=True)
        self.in_proj = Linear((d,), (d,), ("embed", "mlp"), rngs=rngs, initialize=inner)
        self.out_proj = Linear((d,), (d,), ("mlp", "embed"), rngs=rngs, initialize=outer)
        self.scale = layer.mixer.scale
        self.width = d

    def __call__(self, x, context, cache=None):
        x = getattr(x, "carrier", x)
        if cache is None:
            return self._mix(x, LastInput(jnp.zeros_like(x[:, 0])), None)[0], None
        if context.slots.pages is None:
            return self._mix(x, cache, context.slots)
        out, cache = decode_slots(self._mix, [x.reshape(1, -1, self.width)], cache, context.slots)
        return out.reshape(x.shape), cache

    def _mix(self, x, cache, slots):
        before = jnp.concatenate([cache.x[:, None].astype(x.dtype), x[:, :-1]], axis=1)
        last = x[:, -1]
        if slots is not None:
            # A row's padding stands before its tokens in a packed group.
            first = slots.queries == slots.seen[:, None]
            before = jnp.where(first[..., None], cache.x[:, None], before)
            last = jnp.where((slots.queries >= 0).any(1)[:, None], last, cache.x)
        return self.out_proj(x + self.scale * self.in_proj(before)), LastInput(last)

    def make_cache(self, batch, length, dtype):
        return LastInput(jnp.zeros((batch, self.width), dtype))

    def make_shared_cache(self, room, dtype):
        return self.make_cache(room.rows, room.length, dtype)

    def complete_cache(self, cache):
        return cache

    @staticmethod
    def count(config, layer) -> ParameterCount:
        return ParameterCount(2 * config.hidden_size**2, 0)

    @staticmethod
    def flops_per_token(config, layer, length) -> float:
        return 6.0 * config.hidden_size


@pytest.fixture
def shift_config(monkeypatch) -> type[ModelConfig]:
    """The configuration with a key and a layer type for the new mixer."""
    monkeypatch.setitem(MIXERS, ShiftMixer, Shift)
    monkeypatch.setitem(LAYER_TYPES, "shift", LayerType(mixer="shift"))

    class ShiftConfig(ModelConfig):
        shift: ShiftMixer = ShiftMixer(scale=0.5)

    return ShiftConfig


def test_a_mixer_without_a_module_is_refused(shift_config, monkeypatch):
    monkeypatch.delitem(MIXERS, ShiftMixer)
    with pytest.raises(KeyError, match="no module computes ShiftMixer"):
        make(shift_config(**SHAPE, layer_types=("shift", "full_attention")))


def test_a_mixer_of_its_own_file_is_built_counted_and_served(shift_config):
    config = shift_config(**SHAPE, layer_types=("shift", "shift", "full_attention"))
    stored = nnx.state(nnx.eval_shape(lambda: make(config)), nnx.Param)
    assert count_parameters(config).total == sum(int(np.prod(x.shape)) for x in jax.tree.leaves(stored))
    attention = config.model_copy(update={"layer_types": ("full_attention",)})
    of_attention = (model_flops_per_token(attention, 64) - 6 * count_parameters(attention).matmul) / 7
    wanted = 6 * count_parameters(config).matmul + 5 * 6 * 32 + 2 * of_attention
    assert model_flops_per_token(config, 64) == pytest.approx(wanted)
    serve_and_compare(config)
