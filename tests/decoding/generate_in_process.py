"""Generates from a tiny model on all devices of a job, and prints the tokens: one process of it (`test_processes`).

python tests/decoding/generate_in_process.py AXIS PROCESS PROCESSES PORT
"""

import sys

import jax
import numpy as np

from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.sampling import Sampling
from jaxstack.models import ModelConfig, Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, scan_layers=False,
    initialization="fan_in", initializer_range=0.5, max_position_embeddings=128,
)  # fmt: skip


def main(axis: str, process: str, processes: str, port: str) -> None:
    if int(processes) > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process))
    module = ModuleArrays(lambda rngs: Transformer(CONFIG, rngs))
    rules = make_rules(make_mesh(ParallelConfig(**{axis: jax.device_count()})))
    shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
    params, others = jax.jit(module.init, out_shardings=(shardings, None))(jax.random.key(0))
    decoder = Decoder(module, params, others, rules)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 61, length).tolist() for length in (40, 3, 21, 9, 30)]
    for temperature in (0.0, 1.0):
        rows = decoder.generate(prompts, 6, Sampling(temperature=temperature), seed=3)
        print(np.stack([np.asarray(row) for row in rows]).T.tolist(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
