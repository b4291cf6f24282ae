"""Data pipeline and checkpoints with another model and training loop: it resumes bit by bit.

python docs/examples/checkpoints_and_data.py
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.leaves import abstract_state
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.data.config import DataConfig, SourceConfig, TokenizerConfig
from jaxstack.data.loader import open_data

TEXT = "the quick brown fox jumps over the lazy dog, and over the fence. " * 200
OPTIMIZER = optax.adam(1e-2)


def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """A bigram model: each token's logits are a row of a table."""
    losses = optax.softmax_cross_entropy_with_integer_labels(params["table"][tokens], jnp.maximum(labels, 0))
    counts = labels >= 0  # -100 marks what is no target, such as the first token of a document
    return jnp.sum(losses * counts) / jnp.sum(counts)


@jax.jit
def train_step(state: Any, tokens: jax.Array, labels: jax.Array) -> Any:
    """(the next state, the loss)."""
    value, gradients = jax.value_and_grad(loss)(state["params"], tokens, labels)
    updates, moments = OPTIMIZER.update(gradients, state["moments"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value


def train(folder: Path, steps: int, every: int = 10) -> list[float]:
    """Train from the newest checkpoint; return the losses."""
    config = DataConfig(
        sources=(SourceConfig(path=str(folder / "texts")),),
        tokenizer=TokenizerConfig(name="byte"),
        held_out_fraction=0.0,
        cache_dir=str(folder / "cache"),
    )
    data = open_data(config, sequence_length=32, seed=0)
    params = {"table": jnp.zeros((data.tokenizer.vocab_size, data.tokenizer.vocab_size))}
    state = jax.device_put({"params": params, "moments": OPTIMIZER.init(params)}, jax.devices()[0])
    shardings = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), state)
    losses = []
    with CheckpointManager(folder / "checkpoints", CheckpointConfig(keep=2)) as manager:
        start = manager.latest_step() or 0
        if start:
            state, extra = manager.restore(start, abstract_state(state, shardings))
            assert extra == {"batches": start}
        batches = data.batches(global_batch_size=8, rows=range(8), start=start)
        for step in range(start + 1, steps + 1):
            batch = next(batches)
            state, value = train_step(state, batch["tokens"], batch["labels"])
            losses.append(float(value))
            if step % every == 0:
                manager.save(step, state, {"batches": step})
        batches.close()
    return losses


def main() -> bool:
    """Return True if a resumed run has the losses of an uninterrupted one."""
    with tempfile.TemporaryDirectory() as name:
        unbroken, stopped = Path(name) / "a", Path(name) / "b"
        for folder in (unbroken, stopped):
            (folder / "texts").mkdir(parents=True)
            (folder / "texts" / "fox.txt").write_text(TEXT)
        whole = train(unbroken, 30)
        parts = train(stopped, 20) + train(stopped, 30)
    same = bool(np.array_equal(whole, parts))
    print(f"loss {whole[0]:.3f} -> {whole[-1]:.3f}; {'the same' if same else 'others'} when gone on with after step 20")
    return same


if __name__ == "__main__":
    main()
