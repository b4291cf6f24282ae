"""`Trainer` on modules that are not language models: a vision Transformer in NNX, an LSTM in Linen.

python docs/examples/trainer_vit_and_lstm.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from jaxstack import Trainer
from jaxstack.data.augmentations.images import RandomCrop, RandomFlip, augment_images
from jaxstack.module_arrays.linen import from_linen
from jaxstack.optim.optimizers import AdamW
from jaxstack.run_config import TrainConfig
from jaxstack.trainer import numpy_batches
from pallas_kernels import flash_attention


class Block(nnx.Module):
    """Attention of all patches to all patches, and an MLP."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)])
        self.qkv = nnx.LinearGeneral(width, (3, heads, width // heads), rngs=rngs)
        self.out = nnx.LinearGeneral((heads, width // heads), width, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(self.qkv(self.norms[0](x)), 2, 0)
        x = x + self.out(flash_attention(q, k, v, causal=False))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class VisionTransformer(nnx.Module):
    """Dosovitskiy et al. 2021, arXiv:2010.11929: images [B, 16, 16, 1] -> logits [B, 4]."""

    def __init__(self, rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, 32, kernel_size=(4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (16, 32)))
        self.blocks = nnx.List([Block(32, 2, rngs) for _ in range(2)])
        self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images).reshape(len(images), 16, 32) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Recurrent(linen.Module):
    """An LSTM over a series [B, T, 1] with one output at its end."""

    @linen.compact
    def __call__(self, series: jax.Array) -> jax.Array:
        hidden = linen.RNN(linen.OptimizedLSTMCell(32))(series)
        return linen.Dense(1)(hidden[:, -1])[:, 0]


def classification(model: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


def regression(model: Any, batch: Any) -> jax.Array:
    """Mean squared error."""
    return jnp.mean((model(batch["series"]) - batch["sum"]) ** 2)


def shapes(count: int) -> dict[str, np.ndarray]:
    """Noisy images [16, 16, 1] of a square, a ring, a cross or a diagonal, which the label names."""
    random = np.random.default_rng(0)
    ring, cross = np.ones((6, 6)), np.zeros((6, 6))
    ring[1:5, 1:5] = 0
    cross[2:4], cross[:, 2:4] = 1, 1
    kinds = np.stack([np.ones((6, 6)), ring, cross, np.eye(6)])
    labels = random.integers(0, 4, count).astype(np.int32)
    images = random.normal(scale=0.3, size=(count, 16, 16, 1)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        row, column = random.integers(2, 9, 2)
        image[row : row + 6, column : column + 6, 0] += kinds[label]
    return {"image": images, "label": labels}


def series(count: int) -> dict[str, np.ndarray]:
    """Series of twelve numbers and their sum."""
    values = np.random.default_rng(1).normal(scale=0.3, size=(count, 12, 1)).astype(np.float32)
    return {"series": values, "sum": values.sum((1, 2))}


def main(steps: int = 100) -> dict[str, float]:
    """Train both; return their last losses."""
    train = TrainConfig(steps=steps, global_batch_size=64)
    optimizer = AdamW(learning_rate=1e-2, weight_decay=0.0)
    images = augment_images(numpy_batches(shapes(512), 64), [RandomCrop(padding=2), RandomFlip()])
    vision = Trainer(VisionTransformer, classification, images, optimizer=optimizer, train=train)
    rows = series(512)
    recurrent = Trainer(
        from_linen(Recurrent(), rows["series"][:1]),
        regression,
        numpy_batches(rows, 64),
        optimizer=optimizer,
        train=train,
    )
    found = {"vision Transformer": vision.fit()["loss"], "LSTM": recurrent.fit()["loss"]}
    print(", ".join(f"{name}: {loss:.4f}" for name, loss in found.items()))
    return found


if __name__ == "__main__":
    main()
