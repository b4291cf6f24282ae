"""Random crops and flips of images in batches, for data that is a function from the step to its batch.

Dimensions: H height, W width, C channels.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Shaped
from pydantic import Field

from jaxstack.config.base import Component
from jaxstack.data.batch_source import HostBatch

Image = Shaped[np.ndarray, "H W C"]


class ImageAugmentation(Component):
    """Base class of random changes to an image."""

    @abstractmethod
    def apply(self, image: Image, random: np.random.Generator) -> Image:
        """Return the randomly changed image, which may be a view of the given one."""


class RandomCrop(ImageAugmentation):
    """Pads the image, and crops a random window of the original size."""

    padding: int = Field(default=4, ge=1)
    """Width of the border in pixels; the largest shift."""
    border: Literal["zeros", "reflect"] = "zeros"

    def apply(self, image: Image, random: np.random.Generator) -> Image:
        height, width = image.shape[:2]
        pad = ((self.padding, self.padding), (self.padding, self.padding), (0, 0))
        wide = np.pad(image, pad, mode="constant" if self.border == "zeros" else "reflect")
        top, left = random.integers(0, 2 * self.padding + 1, 2)
        return wide[top : top + height, left : left + width]


class RandomFlip(ImageAugmentation):
    """Mirrors the image, left-right or top-bottom, with probability `rate`."""

    axis: Literal["horizontal", "vertical"] = "horizontal"
    """horizontal: left and right change places; vertical: top and bottom."""
    rate: float = Field(default=0.5, gt=0, le=1)

    def apply(self, image: Image, random: np.random.Generator) -> Image:
        if random.random() >= self.rate:
            return image
        return image[:, ::-1] if self.axis == "horizontal" else image[::-1]


def augment_images(
    batches: Callable[[int], HostBatch],
    augmentations: Sequence[ImageAugmentation],
    *,
    seed: int = 0,
    name: str = "image",
) -> Callable[[int], HostBatch]:
    """Return a function of the step that returns `batches(step)` with its images randomly augmented.

    The changes depend on (seed, step, row) alone, so that a resumed run sees the same images.

    Args:
      batches: function of the step that returns a batch.
      augmentations: applied to each image in this order.
      seed: of the changes.
      name: the array of images [B, H, W, C] in a batch; the other arrays stay as they are.
    """

    def changed(image: Image, step: int, row: int) -> Image:
        random = np.random.default_rng((seed, step, row))
        for one in augmentations:
            image = one.apply(image, random)
        return image

    def at(step: int) -> HostBatch:
        batch = batches(step)
        images = np.stack([changed(image, step, row) for row, image in enumerate(batch[name])])
        return {**batch, name: images}

    return at
