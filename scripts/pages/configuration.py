"""The tables of docs/configuration.md, from the types: every key with its default and its docstring.

The table of a study's keys in docs/tuning.md is made too. Text outside the tables is written by hand.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jaxstack.config.base import NameIn
from jaxstack.local_sgd import METHODS
from jaxstack.local_sgd.base import WorkerMethod
from jaxstack.models.attention import ATTENTION_KINDS
from jaxstack.models.attention.block_sparse import BlockSparseAttention
from jaxstack.models.moe.router import MoEConfig
from jaxstack.models.recurrent import GatedDelta, KimiDelta, StateSpace
from jaxstack.optim.base import Optimizer
from jaxstack.optim.optimizers import OPTIMIZERS
from jaxstack.optim.schedules import SCHEDULES, Schedule
from jaxstack.reinforce.config import SamplerConfig
from jaxstack.reinforce.policy import SamplerCorrection
from jaxstack.reinforce.rewards import REWARDS, Reward
from jaxstack.run_config import RunConfig
from jaxstack.tune.space import StudyConfig
from scripts.pages.page import Page

HEAD = "| key | default | meaning |\n|---|---|---|\n"
NAMED_HEAD = "| name | keys with their defaults |\n|---|---|\n"
BASES = {
    "optimizer": (Optimizer, OPTIMIZERS),
    "schedule": (Schedule, SCHEDULES),
    "local_sgd": (WorkerMethod, METHODS),
}
"""Section that is chosen by name -> its base class and the components that one can choose."""
PARTS = {"policy": {"sampler_correction": SamplerCorrection}, "rollout": {"engine": SamplerConfig}}
"""Section -> its keys that are components with a table of their own."""
SEE = {
    "run.init_from": "[Fine-tuning](finetuning.md)",
    "run.branch_from": "[Tuning](tuning.md#a-long-run-with-decays-that-branch-off)",
    "model.preset": "[Models](models.md)",
    "model.rope_scaling": "[Models](models.md#rotary-positions)",
    "model.attention": "[Models](models.md#attention-kinds), and below",
    "model.moe": "[Models](models.md#mixtures-of-experts), and below",
    "model.delta": "[Models](models.md#gated-deltanet-layers), and below",
    "model.kda": "[Models](models.md#gated-deltanet-layers), and below",
    "model.ssd": "[Models](models.md#state-space-layers), and below",
    "model.attention_implementation": "[Kernels](kernels.md)",
    "model.remat": "[Models](models.md#memory)",
    "train.eval_tasks": "[Evaluation](evaluation.md)",
    "parallel.workers": "[Local SGD](local-sgd.md)",
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
    words = choices(field.annotation) or [name for m in field.metadata if isinstance(m, NameIn) for name in m.names]
    unnamed = [word for word in words if not re.search(rf"\b{re.escape(word)}\b", text)]
    named = ", ".join(f"`{word}`" for word in words) if unnamed else ""
    parts = [f"{named}." if named else "", text, f"See {SEE[key]}." if key in SEE else ""]
    return " ".join(filter(None, parts))


def table(section: str, component: type[BaseModel], prefix: str = "") -> str:
    """Return the table of a component; the name of one that is not chosen by name is left out."""
    rows = []
    for name, field in component.model_fields.items():
        if prefix and name == "name":
            continue
        key = field.alias or name
        default = "(needed)" if field.is_required() else f"`{flow(plain(field.default))}`"
        rows.append(f"| `{prefix}{key}` | {default} | {meaning(f'{section}.{key}', field)} |\n")
    return HEAD + "".join(rows)


def shared_table(base: type[BaseModel], components: Sequence[type[BaseModel]]) -> str:
    """Return the table of the keys that all components of a section have, with the defaults of those that differ."""
    rows = []
    for key, field in base.model_fields.items():
        default = flow(plain(field.default))
        others = {}
        for component in components:
            own = flow(plain(component.model_fields[key].default))
            if own != default:
                others.setdefault(own, []).append(f"`{component.model_fields['name'].default}`")
        differing = ", ".join(f"{' and '.join(names)} {value}" for value, names in others.items())
        said = meaning(key, field) + (f" Default of {differing}." if differing else "")
        rows.append(f"| `{key}` | `{default}` | {said} |\n")
    return HEAD + "".join(rows)


def named_table(components: Sequence[type[BaseModel]], shared: Iterable[str] = (), more: str = "") -> str:
    """Return the table of components that are chosen by name: the keys that are not shared, with their defaults.

    Args:
      components: the components.
      shared: keys that are left out.
      more: added to the head of the second column.
    """
    rows = []
    for component in components:
        fields = component.model_fields.items()
        keys = {field.alias or k: field for k, field in fields if k != "name" and k not in shared}
        texts = ", ".join(named_key(key, field) for key, field in keys.items())
        rows.append(f"| `{component.model_fields['name'].default}` |{f' {texts} ' if texts else ' '}|\n")
    return NAMED_HEAD.replace("defaults |", f"defaults{more} |") + "".join(rows)


def named_key(key: str, field: FieldInfo) -> str:
    """Return a key with its default and, of a few words that one can choose, the others."""
    if field.is_required():
        return f"`{key}` (required)"
    default = field.default.name if isinstance(field.default, BaseModel) else flow(plain(field.default))  # pyright: ignore
    others = [f"`{word}`" for word in choices(field.annotation) if word != default]
    words = f" (or {', '.join(others)})" if others else ""
    return f"`{key}` {default}{words}"


def make_page(text: str) -> str:
    """Return the page with all generated tables updated; other text is unchanged.

    Raises:
      SystemExit: a section has fewer tables than there are to be made.
    """
    parts = re.split(r"^(## \w+)$", text, flags=re.M)
    for index in range(1, len(parts), 2):
        section = parts[index].removeprefix("## ")
        if section not in RunConfig.model_fields:
            continue
        keyed, named = tables_of(section)
        for head, made in ((HEAD, iter(keyed)), (NAMED_HEAD, iter(named))):
            first = re.escape(head.split(" |\n")[0])
            rows = rf"^{first}.*\n(?:\|.*\n)+"
            parts[index + 1] = re.sub(rows, lambda found, made=made: next(made, found[0]), parts[index + 1], flags=re.M)
            if left := list(made):
                raise SystemExit(f"section {section} of configuration.md has no place for this table:\n{left[0]}")
    return "".join(parts)


def make_studies_page(text: str) -> str:
    """Return the page about studies with the table of their keys updated; other text is unchanged."""
    rows = re.escape(HEAD.split(" |\n")[0]) + r".*\n(?:\|.*\n)+"
    return re.sub(rows, lambda _: table("study", StudyConfig), text)


def tables_of(section: str) -> tuple[list[str], list[str]]:
    """Return the tables of a section in their order: those of keys, and those of components chosen by name."""
    if section in BASES:
        base, components = BASES[section]
        return [shared_table(base, components)], [named_table(components, base.model_fields)]
    if section == "reward":
        return [], [named_table(REWARDS, Reward.model_fields)]
    keyed = [table(section, RunConfig.model_fields[section].annotation)]  # pyright: ignore[reportArgumentType]
    keyed += [table(f"{section}.{key}", part, f"{key}.") for key, part in PARTS.get(section, {}).items()]
    if section != "model":
        return keyed, []
    patterns = get_args(BlockSparseAttention.model_fields["pattern"].annotation)
    named = [named_table(ATTENTION_KINDS), named_table(patterns, more=", in blocks")]
    further = (("moe", MoEConfig), ("delta", GatedDelta), ("kda", KimiDelta), ("ssd", StateSpace))
    return [*keyed, *(table(f"model.{name}", kind, f"{name}.") for name, kind in further)], named


PAGES = (
    Page("configuration.md", {}, rewrite=make_page),
    Page("tuning.md", {}, rewrite=make_studies_page),
)
