"""Tokenizers for the web page: bytes, and byte-level BPE as in GPT-2, Llama 3, Qwen and jaxstack itself."""

import json
from typing import Any

from jaxstack.data.subword import byte_alphabet
from jaxstack.data.tokenizer import ByteTokenizer, Tokenizer
from jaxstack.errors import ConfigError

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Regular expression by which the pre-tokenizer ByteLevel splits a text into words (Radford et al. 2019)."""
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, object]:
    """Return what `page/tokenizer.js` needs to encode and decode as a tokenizer does.

    Returns:
      `kind` byte or bpe. With bpe: `tokens`, the bytes of each id in hexadecimal; `merges` [left, right, merged] in
      order; `byteIds`, the id of each byte; `patterns`, regular expressions that split a text into words, one after the
      other; `normalizer`; `whole`, True if a word that is a token is not merged; and `added`, texts that are one id
      wherever they stand.

    Raises:
      ConfigError: the tokenizer is of another kind; the message names the feature.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return {"kind": "byte"}
    text = tokenizer.tokenizer_json()
    if text is None or not tokenizer.writes_bytes:
        raise _cannot(f"a {tokenizer.kind} tokenizer whose ids do not stand for bytes")
    said = json.loads(text)
    model = said["model"]
    if model.get("type") != "BPE":
        raise _cannot(f"its model {model.get('type')}")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise _cannot(f"its {key} ({model[key]})")
    vocabulary: dict[str, int] = model["vocab"]
    alphabet = byte_alphabet()
    if missing := [byte for byte, character in alphabet.items() if character not in vocabulary]:
        raise _cannot(f"a vocabulary without the byte {missing[0]}")
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return {
        "kind": "bpe",
        "tokens": [tokenizer.decode_bytes([i]).hex() for i in range(tokenizer.vocab_size)],
        "merges": [[vocabulary[left], vocabulary[right], vocabulary[left + right]] for left, right in pairs],
        "byteIds": [vocabulary[alphabet[byte]] for byte in range(256)],
        "patterns": [_for_javascript(pattern) for pattern in _patterns(said.get("pre_tokenizer"))],
        "normalizer": _normalizer(said.get("normalizer")),
        "whole": bool(model.get("ignore_merges")),
        "added": _added(said.get("added_tokens") or []),
    }


def _patterns(step: dict[str, Any] | None) -> list[str]:
    """Return the regular expressions of a pre-tokenizer, in the syntax of the tokenizers library."""
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
    """Return a pattern for JavaScript: its `\\s` is not Unicode's white space, so it is replaced."""
    return pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")


def _normalizer(step: dict[str, Any] | None) -> str | None:
    if step is None or step.get("type") in _NORMALIZERS:
        return step["type"] if step else None
    if step.get("type") == "Sequence" and not step["normalizers"]:
        return None
    raise _cannot(f"its normalizer {step.get('type')}")


def _added(tokens: list[dict[str, Any]]) -> dict[str, int]:
    """Return the added tokens that text is searched for; special ones are encoded as ordinary characters."""
    found = [token for token in tokens if not token.get("special")]
    for token in found:
        if wrong := [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]:
            raise _cannot(f"its token {token['content']!r} with {wrong[0]}")
    return {token["content"]: token["id"] for token in found}


def _cannot(what: str) -> ConfigError:
    return ConfigError(f"{what}: the page has tokenizers of bytes and of byte-level BPE")
