"""A very small random model over bytes, for the engine and the server."""

import jax

from jaxstack.data.tokenizer import ByteTokenizer
from jaxstack.decoding.decoder import Decoder
from jaxstack.models import ModelConfig, Transformer, with_kv_cache
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules

TOKENIZER = ByteTokenizer()
CONFIG = ModelConfig(
    vocab_size=257, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, intermediate_size=48,
    initialization="fan_in", initializer_range=0.5, max_position_embeddings=256, scan_layers=False,
)  # fmt: skip


def open_tiny(kv_cache: str = "none", seed: int = 0, config: ModelConfig = CONFIG, tensor: int = 1) -> Decoder:
    """The model, on `tensor` devices; with a cache in few bits its heads are wide enough for one."""
    config = config if kv_cache == "none" else config.model_copy(update={"head_dim": 32})
    module = ModuleArrays(lambda rngs: with_kv_cache(Transformer(config, rngs), kv_cache))
    rules = make_rules(make_mesh(ParallelConfig(tensor=tensor), jax.devices()[:tensor]))
    params, non_params = jax.jit(module.init)(jax.random.key(seed))
    shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules), is_leaf=lambda x: isinstance(x, jax.P))
    return Decoder(module, jax.device_put(params, shardings), non_params, rules)
