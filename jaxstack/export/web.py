"""Export of a model to a folder with a web page, whose JavaScript runs it in the browser by WebAssembly or WebGPU.

The page gets its tokenizer as JSON: bytes, byte-level BPE (GPT-2, Llama 3, Qwen), or SentencePiece BPE (Gemma). A local
web server shows the folder.
"""

import functools
import json
import shutil
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jaxstack.data.load_tokenizer import byte_alphabet
from jaxstack.data.tokenizer import ByteTokenizer, Tokenizer
from jaxstack.errors import ConfigError
from jaxstack.export.source import Source, dense_softmax_problem, write_parameters
from jaxstack.files import write_file
from jaxstack.models.norm import NORMS, RMSNorm

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Regular expression by which the pre-tokenizer ByteLevel splits a text into words (Radford et al. 2019)."""
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")
_MARK = "\u2581"
"""Character that represents a space in SentencePiece's vocabularies."""


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, object]:
    """Describe a tokenizer as plain JSON, which the exported web page's JavaScript reads to encode and decode text.

    Returns:
      `kind` byte or bpe. With bpe: `tokens`, the bytes of each id in hexadecimal; `merges` [left, right, merged] in
      order; `byteIds`, the id of each byte; `patterns`, regular expressions that split a text into words, one after the
      other; `normalizer`; `whole`, True if a word that is a token is not merged; and `added`, texts that are one id
      wherever they stand. SentencePiece's BPE merges characters: `characters` has the ids of those in the vocabulary
      (others are bytes), and `prefix` says whether a text begins with a space: "always", "missing" (one is added if
      there is none) or None.

    Raises:
      ConfigError: the tokenizer is of another kind; the message names the feature.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return {"kind": "byte"}
    text = tokenizer.tokenizer_json()
    if text is None:
        raise _cannot(f"a {tokenizer.kind} tokenizer")
    said = json.loads(text)
    model = said["model"]
    if model.get("type") != "BPE":
        raise _cannot(f"its model {model.get('type')}")
    if not tokenizer.writes_bytes and not model.get("byte_fallback"):
        raise _cannot("a vocabulary without bytes")
    unknown = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    for key in (*unknown, "byte_fallback") if tokenizer.writes_bytes else unknown:
        if model.get(key):
            raise _cannot(f"its {key} ({model[key]})")
    vocabulary: dict[str, int] = model["vocab"]
    alphabet = byte_alphabet() if tokenizer.writes_bytes else {byte: f"<0x{byte:02X}>" for byte in range(256)}
    if missing := [byte for byte, character in alphabet.items() if character not in vocabulary]:
        raise _cannot(f"a vocabulary without the byte {missing[0]}")
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    added = _added(said.get("added_tokens") or [])
    return {
        "kind": "bpe",
        "merges": [[vocabulary[left], vocabulary[right], vocabulary[left + right]] for left, right in pairs],
        "byteIds": [vocabulary[alphabet[byte]] for byte in range(256)],
        "whole": bool(model.get("ignore_merges")),
        "added": added,
        **(_byte_level(tokenizer, said) if tokenizer.writes_bytes else _sentencepiece(tokenizer, said, added)),
    }


def _byte_level(tokenizer: Tokenizer, said: dict[str, Any]) -> dict[str, object]:
    """Return the JSON entries of a byte-level BPE tokenizer (GPT-2, Llama 3, Qwen): tokens, patterns, normalizer."""
    return {
        "tokens": [tokenizer.decode_bytes([i]).hex() for i in range(tokenizer.vocab_size)],
        "patterns": [_for_javascript(pattern) for pattern in _patterns(said.get("pre_tokenizer"))],
        "normalizer": _normalizer(said.get("normalizer")),
    }


def _sentencepiece(tokenizer: Tokenizer, said: dict[str, Any], added: dict[str, int]) -> dict[str, object]:
    """Return the JSON entries of a SentencePiece BPE tokenizer: tokens, characters, patterns, prefix, normalizer.

    SentencePiece: Kudo and Richardson 2018.
    """
    vocabulary: dict[str, int] = said["model"]["vocab"]
    tokens = [b""] * tokenizer.vocab_size
    for token, i in (vocabulary | added).items():
        tokens[i] = token.replace(_MARK, " ").encode()
    for byte in range(256):
        tokens[vocabulary[f"<0x{byte:02X}>"]] = bytes([byte])
    for token in said.get("added_tokens") or []:
        if token.get("special"):
            tokens[token["id"]] = b""
    prefix, split = _spaces(said.get("normalizer"), said.get("pre_tokenizer"))
    if prefix and added:
        raise _cannot(f"its token {next(iter(added))!r} in addition to a space that begins a text")
    return {
        "tokens": [token.hex() for token in tokens],
        "characters": {token: i for token, i in vocabulary.items() if len(token) == 1},
        "patterns": [f"{_MARK}[^{_MARK}]*"] if split else [],
        "prefix": prefix,
        "normalizer": None,
    }


def _spaces(normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None) -> tuple[str | None, bool]:
    """Return when a leading space is added ("always", "missing" or None), and True if words are split at spaces.

    Raises:
      ConfigError: it does more than that.
    """
    prefix = None
    split = False
    marks = False
    for step in (normalizer or {}).get("normalizers") or ([normalizer] if normalizer else []):
        if step["type"] == "Prepend" and step["prepend"] == _MARK:
            prefix = "always"
        elif step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _MARK:
            marks = True
        else:
            raise _cannot(f"its normalizer {step['type']}")
    kind = (pre_tokenizer or {}).get("type")
    if kind == "Metaspace" and pre_tokenizer is not None and pre_tokenizer["replacement"] == _MARK and not marks:
        prefix = None if pre_tokenizer.get("prepend_scheme") == "never" else "missing"
        marks = True
        split = pre_tokenizer.get("split", True)
    elif pre_tokenizer is not None and not (marks and kind == "Split" and pre_tokenizer["pattern"] == {"String": " "}):
        raise _cannot(f"its pre-tokenizer {kind}")  # a split at spaces finds none after the normalizer
    if not marks:
        raise _cannot("a vocabulary of bytes and words without marks for spaces")
    return prefix, split


def _patterns(step: dict[str, Any] | None) -> list[str]:
    """Return the regular expressions by which the `pre_tokenizer` of a tokenizer.json splits text into words."""
    if step is None:
        return []
    kind = step.get("type")
    if kind == "Sequence":
        return [pattern for inner in step["pretokenizers"] for pattern in _patterns(inner)]
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return [_WORDS] if step.get("use_regex", True) else []
    pattern = (step.get("pattern") or {}).get("Regex")
    if kind == "Split" and pattern and step.get("behavior") == "Isolated" and not step.get("invert"):
        return [pattern]
    raise _cannot(f"its pre-tokenizer {kind}" + (" with add_prefix_space" if step.get("add_prefix_space") else ""))


def _for_javascript(pattern: str) -> str:
    """Convert a regular expression to JavaScript, where `\\s` would not match all Unicode white space."""
    return pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")


def _normalizer(step: dict[str, Any] | None) -> str | None:
    if step is None or step.get("type") in _NORMALIZERS:
        return step["type"] if step else None
    if step.get("type") == "Sequence" and not step["normalizers"]:
        return None
    raise _cannot(f"its normalizer {step.get('type')}")


def _added(tokens: list[dict[str, Any]]) -> dict[str, int]:
    """Return {token: id} of the added tokens that are matched in text; special tokens are not, and are left out."""
    found = [token for token in tokens if not token.get("special")]
    for token in found:
        if wrong := [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]:
            raise _cannot(f"its token {token['content']!r} with {wrong[0]}")
    return {token["content"]: token["id"] for token in found}


def _cannot(what: str) -> ConfigError:
    return ConfigError(f"{what}: the page has tokenizers of bytes, byte-level BPE and SentencePiece's BPE with bytes")


PAGE = Path(__file__).parent / "page"
"""The page and its scripts, which are the same for every model."""
_MOST_BYTES = 3_500_000_000
"""Largest size of the weights: WebAssembly addresses 4 GB, which also hold the cache."""


def problem(source: Source) -> str | None:
    """Return the first feature of the model or tokenizer that the web page does not support, as text; None if none."""
    if found := dense_softmax_problem(source.model):
        return found
    if source.model.positions == "rope" and source.model.rotary_channels < source.model.width_per_head:
        return f"partial_rotary_factor: {source.model.partial_rotary_factor} (only 1, all channels of a head rotate)"
    size = sum(array.nbytes for array in source.parameters.values())
    if size > _MOST_BYTES:
        return f"its weights take {size / 1e9:.1f} GB, and a page can address 4 GB"
    try:
        describe_tokenizer(source.tokenizer)
    except ConfigError as error:
        return str(error)
    return None


def write(source: Source, folder: Path) -> str:
    """Write the web page with the model's weights, configuration and tokenizer into a folder."""
    shutil.copytree(PAGE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    write_parameters(source, folder)
    _write_json(folder / "model.json", describe_model(source))
    _write_json(folder / "tokenizer_page.json", describe_tokenizer(source.tokenizer))
    return "python -m http.server --directory {folder}, and open http://127.0.0.1:8000 (or export with --serve)"


def describe_model(source: Source) -> dict[str, object]:
    """Describe the model's configuration as plain JSON for the web page's JavaScript."""
    model = source.model
    rotations = model.rotations()
    whole = rotations.get("global", rotations.get("local"))
    local = rotations.get("local")
    norm = NORMS[model.norm]
    return {
        "hidden": model.hidden_size,
        "layers": model.num_layers,
        "heads": model.num_heads,
        "kvHeads": model.kv_heads,
        "width": model.width_per_head,
        "feedForward": model.feed_forward_size,
        "gated": model.mlp == "gated",
        "activation": model.hidden_act,
        "vocabulary": model.vocab_size,
        "tied": model.tie_word_embeddings,
        "embeddingScale": model.embedding_factor,
        "normEps": model.norm_eps,
        "normOffset": norm.offset if issubclass(norm, RMSNorm) else 0,
        "windows": model.windows(),
        "frequencies": whole and whole.frequencies().tolist(),
        "angleFactor": whole.factor if whole else 1,
        "localFrequencies": local and local.frequencies().tolist(),
        "scale": model.attention_scale,
        "softCap": model.attn_logit_softcapping,
        "finalCap": model.final_logit_softcapping,
        "generation": source.generation(),
    }


def _write_json(path: Path, value: object) -> None:
    write_file(path, json.dumps(value, separators=(",", ":")).encode())


class _Handler(SimpleHTTPRequestHandler):
    """Serves files with HTTP headers for cross-origin isolation, which browsers demand for high-resolution timers."""

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the log line of each HTTP request."""


_Handler.extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript"}


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a web server of a folder at 127.0.0.1; port 0 takes any free port.

    Raises:
      ConfigError: the port is taken, or not permitted.
    """
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_Handler, directory=str(folder)))
    except OSError as error:
        raise ConfigError(f"--serve: cannot listen on port {port} ({error.strerror}); give another one.") from None


def serve_until_interrupted(folder: Path, port: int) -> None:
    """Serve a folder over HTTP on this machine until Ctrl-C."""
    with make_server(folder, port) as server:
        print(f"open http://127.0.0.1:{server.server_address[1]} (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
