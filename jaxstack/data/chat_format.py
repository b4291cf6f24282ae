"""Reads the chat template of a tokenizer's directory, and the special tokens that the template uses."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxstack.errors import ConfigError

CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatFormat:
    """A chat template in Jinja, or None, and the texts of the special tokens that it may write (`bos_token`, ...)."""

    template: str | None = None
    tokens: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> str:
        """Return the content of tokenizer_config.json, which `transformers` can read too."""
        template = {} if self.template is None else {"chat_template": self.template}
        return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **self.tokens, **template}, indent=2) + "\n"


def read_chat_format(folder: Path) -> ChatFormat:
    """Read chat_template.jinja, tokenizer_config.json and special_tokens_map.json in a Hugging Face directory.

    Raises:
      ConfigError: one of them cannot be read.
    """
    known = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / CONFIG)}
    tokens = {}
    for name in _TOKENS:
        value = known.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    template = known.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    path = folder / _TEMPLATE
    if path.is_file():
        template = read_template_file(path)
    return ChatFormat(template if isinstance(template, str) else None, tokens)


def read_template_file(path: Path) -> str:
    """Read a chat template from a file.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the chat template {path}: {error}.") from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}.") from None
    return found if isinstance(found, dict) else {}
