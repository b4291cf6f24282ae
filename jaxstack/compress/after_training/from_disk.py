"""Compresses a Hugging Face checkpoint that may be larger than the memory: it reads and writes one layer at a time.

In memory are a layer (or embedding, or head) in float32 with what its methods need, one file of compressed weights
before it is written, and the hidden states of the calibration text, which are in host memory between two layers. The
weights are bit-equal to those of `compress` with the whole model in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.checkpoint.compressed import named_leaves, stored_bytes, write_leaves
from jaxstack.compress.after_training.calibrate import LayerRunner
from jaxstack.compress.after_training.layerwise import LayerCompression, Part
from jaxstack.compress.after_training.report import CompressionReport, WeightRow
from jaxstack.compress.after_training.stored_weights import as_stored, describe_weight
from jaxstack.compress.base import AfterTraining, compress_weight, method_name
from jaxstack.compress.config import Recipe
from jaxstack.compress.matrix import MatrixLayout, forward_order_key
from jaxstack.models import Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parameter_paths import nest
from jaxstack.run.load import check_finite
from jaxstack.run.setting import Setting
from jaxstack.run_config import RunConfig
from jaxstack.stored import StoredModel
from jaxstack.stored.model import Report, initial_variables

_READ_IN_PARTS = ("decoder", "embedding", "head", "mtp")
"""Top-level parameters that are not kept in memory."""


class DiskCompression:
    """Compression of a checkpoint of which one layer is in memory at a time.

    Args:
      stored: the checkpoint.
      config: its configuration, with the layout of the compression, in float32.
      methods: method of each weight to compress.
      layouts: the weights that can be compressed, as matrices.
      recipe: how plain parameters are stored, and how experts are calibrated.
      report: called with each line of progress and each warning.

    Raises:
      ConfigError: the weights of this kind of model are not read layer by layer.
    """

    def __init__(
        self,
        stored: StoredModel,
        config: RunConfig,
        methods: Mapping[str, AfterTraining],
        layouts: Mapping[str, MatrixLayout],
        recipe: Recipe,
        report: Report,
    ):
        setting = Setting.of(config, "decode", chosen=True)
        unrolled = config.model.model_copy(update={"scan_layers": False, "unscanned_end_layers": 0})
        self._stored = stored
        self._files = stored.open_layers(unrolled)
        self._rules = setting.rules
        self._module = ModuleArrays(lambda rngs: Transformer(unrolled, rngs, dtype=setting.dtype))
        self._shapes = named_leaves(self._module.abstract_params)
        self._methods = methods
        self._layouts = layouts
        self._recipe = recipe
        self._report = report
        self._rows: dict[str, WeightRow] = {}
        self._errors: Mapping[str, float] = {}
        self._expert_tokens: Mapping[str, list[int]] = {}
        self._bytes = [0, 0]

    def write(self, folder: Path, batches: Sequence[Mapping[str, Any]], step: int) -> CompressionReport:
        """Compress the weights and write them to a run directory; return the report of their sizes and errors.

        Args:
          folder: the run directory.
          batches: calibration text; none if no method needs it.
          step: step of the checkpoint.

        Raises:
          JaxstackError: the disk is full, or a parameter is no number.
        """
        sizes: dict[str, int] = {}
        for path, shape in self._shapes.items():
            part = "/".join(path.split("/")[:3])
            sizes[part] = sizes.get(part, 0) + 4 * shape.size
        write_leaves(folder, self._leaves(batches), step, file_bytes=max(sizes.values()))
        return CompressionReport(
            source=str(self._stored.directory),
            step=step,
            bytes_before=self._bytes[0],
            bytes_after=self._bytes[1],
            loss_before=None,
            loss_after=None,
            rows=[self._rows[path] for path in self._layouts],
            loss_by_layer={},
            expert_tokens=dict(self._expert_tokens),
        )

    def _leaves(self, batches: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield each parameter as it is stored, with its path, and record its sizes and errors."""
        for part in self._calibrated(batches) if batches else self._rounded():
            for path, before in part.before.items():
                stored = as_stored(part.changed.get(path, before), self._recipe)
                if path in self._layouts:
                    error = self._errors.get(path)
                    method = self._methods.get(path)
                    self._rows[path] = describe_weight(path, method, self._layouts[path], before, stored, error)
                self._bytes[0] += 2 * before.size
                self._bytes[1] += stored_bytes(stored)
                yield path, stored

    def _rounded(self) -> Iterator[Part]:
        """Yield the parameters one by one, compressed by methods without calibration."""
        number = 0
        for path in sorted(self._shapes, key=forward_order_key):
            before = self._read(path)
            changed = {}
            if path in self._methods:
                number += 1
                self._report(f"[{number}/{len(self._methods)}] {path}: {method_name(self._methods[path])}")
                changed[path] = compress_weight(before, self._methods[path], self._layouts[path])
            yield Part({path: before}, changed)

    def _calibrated(self, batches: Sequence[Mapping[str, Any]]) -> Iterator[Part]:
        """Yield the parameters of one layer after the other, calibrated on the compressed layers before it."""
        shapes = self._module.abstract_params
        kept = {name: self._read(name) for name in shapes if name not in _READ_IN_PARTS}
        model = self._module.merge({**shapes, **kept}, initial_variables(self._module))
        runner = LayerRunner(model.dtype, self._rules, on_host=True)
        run = LayerCompression(model, runner, self._recipe.calibration.expert_tokens, self._report, self._read)
        self._errors = run.result.output_errors
        self._expert_tokens = run.result.expert_tokens
        done: set[str] = set()
        for part in run.parts(batches, self._methods):
            done |= part.before.keys()
            yield part
        for path in sorted(self._shapes.keys() - done, key=forward_order_key):
            yield Part({path: self._read(path)}, {})

    def _read(self, path: str) -> Any:
        """Read the parameters at or below a path in float32."""
        below = {name.removeprefix(f"{path}/"): x for name, x in self._shapes.items() if name.startswith(f"{path}/")}
        dtypes = nest(below.items()) if below else self._shapes[path]
        found = jax.tree.map(jnp.asarray, self._files.read(path, dtypes))
        check_finite({path: found}, self._stored)
        return found
