"""A language model whose token embeddings stay in host memory, in generation and in the serving engine.

python docs/examples/host_embedding.py

`host_gather` copies only the rows of the tokens at hand to the GPU, which reads them from pinned memory itself. A table
of 262,144 rows of 3,840 numbers in bfloat16 leaves 2 GB of the GPU to pages of the KV cache. Such a model must have an
output head of its own (`tie_word_embeddings: false`), runs on one GPU, and does not train the table.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.sampling import Sampling
from jaxstack.models import ModelConfig, Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import make_mesh, make_rules
from jaxstack.serve.config import EngineConfig
from pallas_kernels import HostTable, host_gather


class HostEmbedding(nnx.Module):
    """Token embedding whose table [rows, D] is in host memory and is not a trained parameter; replaces `Embedding`."""

    def __init__(self, table: HostTable):
        self.table = table

    def __call__(self, ids: Int[Array, "B T"], dtype: jax.typing.DTypeLike) -> Float[Array, "B T D"]:
        """Look up the embeddings of int32 ids, in the compute dtype."""
        return host_gather(self.table, ids).astype(dtype)


def move_embedding_to_host(decoder: Decoder) -> Decoder:
    """Return a decoder of the same model whose embedding table is in host memory; the device's copy can be freed.

    Raises:
      ValueError: the output head is the embedding table, or the model is on several devices.
    """
    if decoder.config.tie_word_embeddings or decoder.rules.mesh.size > 1:
        raise ValueError("an embedding in host memory needs an output head of its own, and one device.")
    table = HostTable.of(np.asarray(decoder.params["embedding"]["table"]))

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model: Any = decoder.module.make(rngs)
        model.embedding = HostEmbedding(table)
        return model

    params = {name: value for name, value in decoder.params.items() if name != "embedding"}
    return Decoder(ModuleArrays(make), params, decoder.non_params, decoder.rules)


def main() -> bool:
    # A trained model instead of a random one: decoder = jaxstack.run.load.load("runs/served").decoder
    config = ModelConfig(
        vocab_size=1000, hidden_size=64, num_layers=2, num_heads=4, intermediate_size=128,
        tie_word_embeddings=False, scan_layers=False,
    )  # fmt: skip
    module = ModuleArrays(lambda rngs: Transformer(config, rngs, dtype=jnp.bfloat16))
    rules = make_rules(make_mesh(devices=jax.devices()[:1]))
    usual = Decoder(module, *module.init(jax.random.key(0)), rules)
    hosted = move_embedding_to_host(usual)
    saved = sum(x.nbytes for x in jax.tree.leaves(usual.params)) - sum(x.nbytes for x in jax.tree.leaves(hosted.params))
    print(f"{saved:,} bytes fewer on the device")

    prompt, greedy = [5, 9, 2, 44], Sampling(temperature=0)
    texts = [[int(tokens[0]) for tokens in decoder.generate([prompt], 8, greedy)] for decoder in (usual, hosted)]
    with Engine(hosted, EngineConfig(slots=2, context=64, chunk=16), warm_up=False) as engine:
        texts.append(engine.submit(prompt, 8, greedy).result())
    print(*texts, sep="\n")
    return saved == 1000 * 64 * 2 and texts[0] == texts[1] == texts[2]


if __name__ == "__main__":
    main()
