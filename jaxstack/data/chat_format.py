"""Chat templates and special tokens as files of a Hugging Face directory hold them.

Every tokenizer is read with them, so that this module does without jinja2, which only rendering needs.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxstack.errors import ConfigError, JaxstackError

CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatError(JaxstackError):
    """Raised for a chat that a template refuses, or whose answers cannot be located in the text."""


@dataclass(frozen=True)
class ChatFormat:
    """A chat template in Jinja, or None, and the texts of the special tokens that it may write (`bos_token`, ...)."""

    template: str | None = None
    tokens: dict[str, str] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    """Further templates by name; `tool_use` writes chats that have tools."""

    def as_json(self) -> str:
        """Return the content of tokenizer_config.json, which `transformers` can read too."""
        template: dict[str, object] = {} if self.template is None else {"chat_template": self.template}
        if self.named:
            known = {**({} if self.template is None else {"default": self.template}), **self.named}
            template = {"chat_template": [{"name": name, "template": text} for name, text in known.items()]}
        return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **self.tokens, **template}, indent=2) + "\n"


def read_chat_format(folder: Path) -> ChatFormat:
    """Read the chat templates and the special tokens of a Hugging Face directory.

    Its files are chat_template.jinja, additional_chat_templates/NAME.jinja, tokenizer_config.json and
    special_tokens_map.json.

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
    found = template if isinstance(template, list) else [{"name": "default", "template": template}]
    named = {
        str(entry["name"]): entry["template"]
        for entry in found
        if isinstance(entry, dict) and "name" in entry and isinstance(entry.get("template"), str)
    }
    named |= {path.stem: read_template_file(path) for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))}
    path = folder / _TEMPLATE
    if path.is_file():
        named["default"] = read_template_file(path)
    return ChatFormat(named.pop("default", None), tokens, named)


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
