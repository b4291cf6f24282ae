"""Makes the tables of docs/configuration.md from the types: every key with its default and its docstring.

python scripts/configuration_page.py

Text outside the tables, and the tables of components that are chosen by name, are written by hand.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jaxstack.models.moe.config import MoEConfig
from jaxstack.run_config import RunConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
HEAD = "| key | default | meaning |\n|---|---|---|\n"
BY_HAND = ("optimizer", "schedule")
SEE = {
    "run.init_from": "[Fine-tuning](finetuning.md)",
    "model.preset": "[Models](models.md)",
    "model.attention": "[Models](models.md#attention-kinds), and below",
    "model.moe": "[Models](models.md#mixtures-of-experts), and below",
    "model.attention_implementation": "[Kernels](kernels.md)",
    "model.remat": "[Models](models.md#memory)",
    "train.eval_tasks": "[Evaluation](evaluation.md)",
    "parallel.overlap": "[Overlap](parallelism.md#overlap)",
    "parallel.copy_engines": "[Copy engines](parallelism.md#copy-engines)",
    "precision.fp8": "[Precision and FP8](precision.md)",
}
"""Key -> where there is more about it."""


def plain(value: Any) -> Any:
    """Return a default as plain YAML values."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    text = value if isinstance(value, str) and yaml.safe_load(value) == value else json.dumps(value)
    return re.sub(r"^(\d)e-", r"\1.0e-", text)  # a number for every reader of YAML


def choices(annotation: Any) -> list[str]:
    """Return the words of a `Literal`, also within a union."""
    if get_origin(annotation) is Literal:
        return [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return [choice for part in get_args(annotation) for choice in choices(part)]


def meaning(key: str, field: FieldInfo) -> str:
    """Return the docstring, with the choices that it does not mention, and a link."""
    text = " ".join((field.description or "").split()).replace("|", "\\|")
    unnamed = [choice for choice in choices(field.annotation) if not re.search(rf"\b{re.escape(choice)}\b", text)]
    named = ", ".join(f"`{choice}`" for choice in choices(field.annotation)) if unnamed else ""
    parts = [f"{named}." if named else "", text, f"See {SEE[key]}." if key in SEE else ""]
    return " ".join(filter(None, parts))


def table(section: str, component: type[BaseModel], prefix: str = "") -> str:
    """Return the table of a component."""
    rows = []
    for name, field in component.model_fields.items():
        key = field.alias or name
        default = "(needed)" if field.is_required() else f"`{flow(plain(field.default))}`"
        rows.append(f"| `{prefix}{key}` | {default} | {meaning(f'{section}.{key}', field)} |\n")
    return HEAD + "".join(rows)


def make_page(text: str) -> str:
    """Return the page with all generated tables updated; other text is unchanged."""
    parts = re.split(r"^(## \w+)$", text, flags=re.M)
    for index in range(1, len(parts), 2):
        section = parts[index].removeprefix("## ")
        if section in RunConfig.model_fields and section not in BY_HAND:
            tables = [table(section, RunConfig.model_fields[section].annotation)]  # pyright: ignore[reportArgumentType]
            if section == "model":
                tables.append(table("model.moe", MoEConfig, "moe."))
            made = iter(tables)
            rows = r"^\| key \| default \| meaning \|\n(?:\|.*\n)+"
            parts[index + 1] = re.sub(rows, lambda found: next(made, found[0]), parts[index + 1], flags=re.M)  # noqa: B023
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE.name)
