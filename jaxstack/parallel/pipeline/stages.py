"""Assigns a model's layers to pipeline stages, and orders them as the devices store them."""

import dataclasses

import numpy as np

from jaxstack.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """Assignment of a model's layers to virtual pipeline stages, in `groups` equal groups of layers.

    A group is a single layer, or a period of alternating ones.

    There are stages x chunks virtual stages; stage s holds the virtual stages s, s + stages, ... If the groups do not
    divide evenly, the first virtual stages get one more, because the last one also computes the head.
    """

    groups: int
    stages: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.groups < self.stages * self.chunks:
            raise ConfigError(
                f"parallel.pipeline x pipeline_virtual_stages ({self.stages} x {self.chunks}) must not exceed the "
                f"{self.groups} equal groups of layers of the model; nearest: parallel.pipeline="
                f"{max(1, self.groups // self.chunks)}" + (", or fewer virtual stages." if self.chunks > 1 else ".")
            )

    @property
    def most_groups(self) -> int:
        """Largest number of layer groups in any virtual stage; the storage of each has this size."""
        return -(-self.groups // (self.stages * self.chunks))

    @property
    def counts(self) -> np.ndarray:
        """Number of layer groups of each virtual stage, int32 [stages, chunks]."""
        virtual = self.stages * self.chunks
        sizes = np.full(virtual, self.groups // virtual) + (np.arange(virtual) < self.groups % virtual)
        return sizes.reshape(self.chunks, self.stages).T.astype(np.int32)

    @property
    def is_even(self) -> bool:
        """True if all virtual stages have equally many layer groups."""
        return self.groups % (self.stages * self.chunks) == 0

    @property
    def order(self) -> np.ndarray:
        """Index of the layer group in each storage row of each stage, int32 [stages, chunks x rows]; -1: empty row."""
        found = np.full((self.stages, self.chunks, self.most_groups), -1, np.int32)
        ends = np.cumsum(self.counts.T.reshape(-1))
        for virtual, end in enumerate(ends):
            count = self.counts[virtual % self.stages, virtual // self.stages]
            found[virtual % self.stages, virtual // self.stages, :count] = np.arange(end - count, end)
        return found.reshape(self.stages, self.chunks * self.most_groups)

    @property
    def is_canonical(self) -> bool:
        """True if the stages together store the layers in the model's order, without empty rows."""
        return bool(np.array_equal(self.order.reshape(-1), np.arange(self.groups)))

    @property
    def places(self) -> np.ndarray:
        """Storage row of each layer group, counted over all stages, int32 [groups]: the inverse of `order`."""
        flat = self.order.reshape(-1)
        rows = np.flatnonzero(flat >= 0)
        found = np.empty(self.groups, np.int32)
        found[flat[rows]] = rows
        return found
