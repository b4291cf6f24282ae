"""A very small random model over bytes, for the engine and the server."""

import jax

from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.decoding.decode import Decoder
from jaxstack.functional.module import FunctionalModule
from jaxstack.models import ModelConfig, Transformer
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules

TOKENIZER = ByteTokenizer()
CONFIG = ModelConfig(
    vocab_size=257, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=48,
    initialization="fan_in", initializer_range=0.5, max_position_embeddings=256, scan_layers=False,
)  # fmt: skip


def open_tiny() -> Decoder:
    """The model on one device."""
    module = FunctionalModule(lambda rngs: Transformer(CONFIG, rngs))
    rules = make_rules(make_mesh(ParallelConfig(), jax.devices()[:1]))
    params, non_params = jax.jit(module.init)(jax.random.key(0))
    return Decoder(module, params, non_params, rules)
