"""Reading of single layers, and rows of embedding tables, from a Hugging Face checkpoint that stays open."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jaxstack.models.config import ModelConfig
from jaxstack.models.huggingface.families import check_model, describe
from jaxstack.models.huggingface.files import WeightFiles
from jaxstack.models.huggingface.leaves import find_leaves
from jaxstack.models.huggingface.load import check_files, read_chunks
from jaxstack.models.huggingface.tensors import whole


class ModelParts(contextlib.AbstractContextManager["ModelParts"]):
    """Parameters of a Hugging Face checkpoint, read from its files only when they are asked for.

    Args:
      directory: directory with config.json and safetensors.
      config: configuration of the model, with unrolled layers.

    Raises:
      ConfigError: as `from_huggingface`.
    """

    def __init__(self, directory: str | Path, config: ModelConfig):
        family, described = describe(directory)
        check_model(config, described, str(directory))
        leaves = find_leaves(config, family.tensors)
        self._files = WeightFiles(Path(directory))
        check_files(self._files, family, config, leaves, None)
        self._leaves = {leaf.path: leaf for leaf in leaves}

    def __exit__(self, *error: object) -> None:
        self._files.__exit__(*error)

    def read(self, path: str, dtypes: Any) -> Any:
        """Read the parameters below a path such as `decoder/layers/3`, as nested dicts of NumPy arrays.

        Args:
          path: keys joined by `/`.
          dtypes: for each of these parameters something that has its dtype.
        """
        if isinstance(dtypes, dict):
            return {key: self.read(f"{path}/{key}", inner) for key, inner in dtypes.items()}
        leaf = self._leaves[path]
        chunks = [chunk.astype(dtypes.dtype) for chunk in read_chunks(self._files, leaf, whole(leaf.shape))]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)

    def rows(self, path: str, numbers: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N D"]:
        """Read the rows `numbers` of a table such as `embedding/table`, as float32."""
        leaf = self._leaves[path]
        columns = slice(0, leaf.shape[1])
        found = [next(read_chunks(self._files, leaf, (slice(n, n + 1), columns))) for n in numbers.tolist()]
        return np.concatenate(found)
