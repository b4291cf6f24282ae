"""Predicts what a mixture's routed experts compute and move besides the matmuls of even groups of tokens.

The counts were read from programs that XLA compiles for H200s (gpt-oss 20B and Qwen 3 30B-A3B, one device and `expert`
2). Per device and layer, with N routed rows (tokens x experts per token), G experts, width D of the model and F of an
expert:

- each expert's rows are padded to a multiple of the tile, half a tile on average, which the matmuls compute;
- arrays have room for any routing: N + 127 G rows, and with the axis `expert` as many received ones as the exchange has
  slots, `exchange_factor` N; elementwise operations compute all of them;
- each token is copied to the rows of its experts and summed from them, forward and backward; with `expert` once more
  before and after each all-to-all, which also copies the part that stays;
- in FP8 the rows are quantized along both dims: D and F forward, D and 2 F backward (with a gate), 2 bytes read and 2
  written for each value; widths that are no multiples of 128 are padded, the weights by a copy in float32.
"""

import dataclasses
import math

from jaxstack.cost_model.layouts import Floats, LayoutTable
from jaxstack.cost_model.memory import microbatch_tokens_per_device
from jaxstack.cost_model.model_shape import ModelShape
from pallas_kernels.fp8.blockwise import BLOCK
from pallas_kernels.grouped_gemm.mosaic import TILE_ROWS


@dataclasses.dataclass(frozen=True)
class RoutedExperts:
    """Rows and bytes of the routed experts of one layer on each device, for each layout.

    Attributes:
      shape: the model, which has a mixture of experts.
      layouts: the layouts.
      tokens: tokens of a global batch.
    """

    shape: ModelShape
    layouts: LayoutTable
    tokens: int

    @property
    def even(self) -> Floats:
        """Number of routed rows N of a microbatch on each device if the experts get equally many."""
        return microbatch_tokens_per_device(self.layouts, self.tokens) * self.shape.routed

    @property
    def computed(self) -> Floats:
        """Number of rows that the matmuls compute."""
        return self.even + self._groups * (TILE_ROWS - 1) / 2

    @property
    def stored(self) -> Floats:
        """Number of rows of the arrays that the experts read and write."""
        return self._received + self._groups * (TILE_ROWS - 1)

    @property
    def copied_bytes(self) -> Floats:
        """Bytes of copying tokens to the rows of their experts and summing them, forward and backward."""
        expert = self.layouts["expert"]
        summed = 3 if self.shape.gated else 2  # backward the gradients from gate and up projection
        alone = 4 * self.stored + summed * self.even
        staying = 8 / expert  # two all-to-alls forward and two backward read and write it
        exchanged = 4 * self.stored + (6 + staying) * self._received + (summed + 2) * self.even
        values = (expert == 1) * alone + (expert > 1) * exchanged
        return 2 * self.shape.hidden * values

    @property
    def activation_values(self) -> Floats:
        """Number of values of the inner activations, rows x width of an expert."""
        return self.stored * self.shape.expert_width

    @property
    def quantized_bytes(self) -> Floats:
        """Bytes of quantizing the inputs and the gradients of the matmuls to FP8."""
        inner = 3 if self.shape.gated else 2
        return 4 * self.stored * (2 * self.shape.hidden + inner * self.shape.expert_width / self.layouts["tensor"])

    @property
    def weight_bytes(self) -> int:
        """Bytes moved to quantize a weight: read in float32 and written in FP8 twice; if padded, copied before."""
        return 6 if self.padded == 1 else 14

    @property
    def padded(self) -> float:
        """FLOPs of the matmuls in FP8, whose widths are padded, relative to those of the widths themselves."""
        widths = self.shape.hidden, self.shape.expert_width
        return math.prod(-(-width // BLOCK) * BLOCK / width for width in widths)

    @property
    def _groups(self) -> Floats:
        return self.shape.experts / self.layouts["expert"]

    @property
    def _received(self) -> Floats:
        more = self.layouts["expert"] > 1
        return self.even * (1 + more * (self.shape.exchange_factor - 1))
