"""Measured fractions of a device's peak rates that training achieves, from rows of `benchmarks/results`.

`benchmarks/calibrate_planner.py` writes them to `efficiency.json`, together with the rows they come from.
"""

import functools
import json
from pathlib import Path

from pydantic import Field

from jaxstack.config.base import Component
from jaxstack.config.loader import build_component

FILE = Path(__file__).with_name("efficiency.json")


class Efficiency(Component):
    """Measured efficiencies of training: achieved rates as fractions of peak rates, and fixed overheads in seconds.

    All were measured on H200s; other GPUs use the same fractions.
    """

    matmul: float = Field(gt=0, le=1)
    """Matmuls of layers in bfloat16 within a training step, relative to the peak."""
    matmul_fp8: float = Field(gt=0, le=1)
    """Matmuls with FP8 operands within a training step, relative to the FP8 peak."""
    head: float = Field(gt=0, le=1)
    """The matmuls of the output head and the loss, which are in bfloat16 always, relative to the peak."""
    attention_64: float = Field(gt=0, le=1)
    """Attention forward and backward at head_dim 64 and long sequences, relative to the bfloat16 peak."""
    attention_128: float = Field(gt=0, le=1)
    """The same at head_dim 128 and above."""
    attention_half_length: float = Field(ge=0)
    """Sequence length in tokens at which attention reaches half of its rate for long sequences."""
    elementwise: float = Field(gt=0, le=2)
    """Elementwise passes between the matmuls, relative to the memory bandwidth, by the planner's count of bytes."""
    copy_rate: float = Field(gt=0, le=1)
    """Reading and writing large arrays, as the optimizer does, relative to the memory bandwidth."""
    scan_passes: float = Field(ge=0)
    """Passes over the saved activations that a scan of layers adds, to stack and to slice them."""
    layer_seconds: float = Field(ge=0)
    """Seconds between kernels, for each layer and microbatch."""
    link: float = Field(gt=0, le=1)
    """Collectives of large arrays within a host, relative to the links' bandwidth."""
    network: float = Field(gt=0, le=1)
    """Collectives of large arrays between hosts, relative to the network's bandwidth."""
    transfers: float = Field(ge=0)
    """Time that transfers of weights and gradients beside computation add to a step, relative to that of the transfers
    by themselves: below 1 if computation hides them, above 1 if they slow it down by more, as both share the
    multiprocessors and the memory."""
    transfers_scanned: float = Field(ge=0)
    """The same in a scan of layers, which gathers a layer as it begins."""
    tick_seconds: float = Field(ge=0)
    """Seconds that each tick of a pipeline adds: a conditional waits for the host."""


@functools.cache
def load_efficiency() -> Efficiency:
    """Load the measured efficiencies that the planner's forecasts use, from `efficiency.json`."""
    return build_component(Efficiency, json.loads(FILE.read_text())["values"], str(FILE))
