"""Generates text with a model exported to StableHLO or ONNX by jaxstack, which copies this script into the export.

This file is copied next to the model and needs nothing of jaxstack: jax (or for ONNX onnxruntime), numpy, and for text
of a subword tokenizer the package tokenizers.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PARAMETERS = "parameters.safetensors"
SETTINGS = "export.json"


class StableHLOModel:
    """A model exported to StableHLO: its prefill and decode programs and its parameters, run by JAX."""

    def __init__(self, folder: Path):
        import jax
        from jax import export

        def read(name: str) -> Any:
            return export.deserialize(bytearray((folder / f"{name}.jax_export").read_bytes())).call

        self._prefill = jax.jit(read("prefill"))
        self._decode = jax.jit(read("decode"), donate_argnums=3)
        self._parameters = {name: jax.device_put(array) for name, array in read_safetensors(folder / PARAMETERS)}

    def start(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Run the model on prompts; return each prompt's next-token logits, float32 [rows, V]."""
        self._lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((len(prompts), self._lengths.max()), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        logits, self._cache = self._prefill(self._parameters, tokens, self._lengths)
        return np.asarray(logits)

    def advance(self, token: np.ndarray) -> np.ndarray:
        """Run the model on one more token of each sequence; return the next-token logits, float32 [rows, V]."""
        logits, self._cache = self._decode(self._parameters, token.astype(np.int32), self._lengths, self._cache)
        self._lengths = self._lengths + 1
        return np.asarray(logits)


class OnnxModel:
    """A model exported to ONNX, run by ONNX Runtime; shorter prompts of a batch are padded at their start."""

    def __init__(self, folder: Path):
        import onnxruntime

        self._session: Any = onnxruntime.InferenceSession(folder / "model.onnx")
        past = [i for i in self._session.get_inputs() if i.name.startswith("past_key_values")]
        self._past = {i.name: (i.shape[1], i.shape[3]) for i in past}

    def start(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Run the model on prompts; return each prompt's next-token logits, float32 [rows, V]."""
        rows = len(prompts)
        longest = max(map(len, prompts))
        tokens, self._mask = np.zeros((2, rows, longest), np.int64)
        for row, mask, prompt in zip(tokens, self._mask, prompts, strict=True):
            row[longest - len(prompt) :] = prompt
            mask[longest - len(prompt) :] = 1
        self._cache = [np.zeros((rows, heads, 0, width), np.float32) for heads, width in self._past.values()]
        return self._run(tokens)

    def advance(self, token: np.ndarray) -> np.ndarray:
        """Run the model on one more token of each sequence; return the next-token logits, float32 [rows, V]."""
        self._mask = np.concatenate([self._mask, np.ones((len(token), 1), np.int64)], axis=1)
        return self._run(token.astype(np.int64)[:, None])

    def _run(self, tokens: np.ndarray) -> np.ndarray:
        positions = np.maximum(np.cumsum(self._mask, axis=1) - 1, 0)[:, -tokens.shape[1] :]
        inputs = {"input_ids": tokens, "attention_mask": self._mask, "position_ids": positions}
        logits, *self._cache = self._session.run(None, inputs | dict(zip(self._past, self._cache, strict=True)))
        return logits[:, -1]


MODELS = {"stablehlo": StableHLOModel, "onnx": OnnxModel}


def read_safetensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the array of each tensor in a safetensors file."""
    import ml_dtypes  # comes with jax

    dtypes = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}
    content = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    for name, entry in json.loads(content[8:start].tobytes()).items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            data = content[start + first : start + last]
            yield name, np.asarray(data.view(dtypes[entry["dtype"]]).reshape(entry["shape"]))


class Text:
    """The tokenizer exported with the model: tokenizer.json, read by the package tokenizers, or else UTF-8 bytes."""

    def __init__(self, folder: Path):
        self._model: Any = None
        if (folder / "tokenizer.json").is_file():
            try:
                from tokenizers import Tokenizer
            except ImportError:
                sys.exit("run.py: text needs the package tokenizers (pip install tokenizers); or give --ids")
            self._model = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self._model.encode(text, add_special_tokens=False).ids if self._model else list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        if self._model:
            return self._model.decode(list(ids))
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def generate(
    model: Any, prompts: Sequence[Sequence[int]], count: int, settings: dict[str, Any], *, temperature=0.0, seed=0
) -> Iterator[np.ndarray]:
    """Generate text for a batch of prompts: yield the next token of each, int32 [rows], `count` times."""
    random = np.random.default_rng(seed)
    logits = model.start(prompts)
    for step in range(count):
        logits = logits[:, : settings["vocabulary"]]
        if temperature > 0:  # the largest of logits with Gumbel noise is a sample
            logits = logits / temperature + random.gumbel(size=logits.shape)
        token = logits.argmax(axis=1).astype(np.int32)
        yield token
        if step + 1 < count:
            logits = model.advance(token)


def main() -> None:
    """Run the command that generates text with the exported model."""
    parser = argparse.ArgumentParser(description="Generate with an exported model.")
    parser.add_argument("--prompt", help="text to continue (default: a new document)")
    parser.add_argument("--ids", help="token ids to continue instead, such as 5,17,3; prints ids")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-document-start", action="store_true", help="do not begin the prompt with that token")
    args = parser.parse_args()
    folder = Path(__file__).resolve().parent
    settings = json.loads((folder / SETTINGS).read_text())
    text = None if args.ids is not None else Text(folder)
    opening = [] if args.no_document_start or text is None else [settings["document_start"]]
    ids = [*opening, *(text.encode(args.prompt or "") if text else map(int, (args.ids or "").split(",")))]
    room = settings["context"] - len(ids)
    if not ids or room < 1:
        sys.exit(f"run.py: a prompt must have between 1 and {settings['context'] - 1} tokens; this one has {len(ids)}")
    model = MODELS[settings["format"]](folder)
    options = {"temperature": args.temperature, "seed": args.seed}
    new: list[int] = []
    for token in generate(model, [ids], min(args.max_tokens, room), settings, **options):
        if token[0] in settings["stop_tokens"] and text is not None:
            break
        new.append(int(token[0]))
    print(f"{args.prompt or ''}{text.decode(new)}" if text else ",".join(map(str, new)))


if __name__ == "__main__":
    main()
