"""Features of a run as data: how a configuration turns one on, which others it excludes and why.

Each component declares its features in the module of its configuration. `jaxstack.run_config.FEATURES` is the table of
all; the configuration refuses what excludes each other, and `docs/combinations.md` is made from it.
"""

import dataclasses
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxstack.errors import ConfigError

MODEL_DIRECTORY = "MODEL_DIRECTORY"
"""Placeholder in `Feature.turn_on` for the directory of a trained model with the same tokenizer."""


@dataclasses.dataclass(frozen=True)
class Excludes:
    """Another feature that a feature cannot be combined with, and why.

    Attributes:
      other: name of the other feature.
      reason: why, as a clause without a full stop.
      message: error message of a configuration that has both: rule, values, way out. Names of keys in braces, such as
        {parallel.pipeline}, are replaced by their values.
    """

    other: str
    reason: str
    message: str


@dataclasses.dataclass(frozen=True)
class Remark:
    """Another feature that a feature works with, but slower or within limits.

    Attributes:
      other: name of the other feature.
      text: what is slower, or where the limit is, as a clause without a full stop.
      slower: True if it costs speed, False if it is a limit.
      turn_on: further overrides with which the two work together, within the limit.
    """

    other: str
    text: str
    slower: bool = True
    turn_on: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A section whose settings a run keeps when it goes on, as the parameters of its checkpoints depend on them.

    Attributes:
      what: what the section describes, for the message.
      new_run: what a new run that starts from this one makes of it, as a clause that begins with "which".
      free: keys of the section, at any depth, that may change nevertheless.
    """

    what: str
    new_run: str
    free: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Feature:
    """Something that a configuration turns on, such as a pipeline or adapters.

    Attributes:
      name: its name in the table, such as "pipeline".
      section: section of the configuration that `used` reads.
      used: function of the section that returns True if the feature is on.
      turn_on: overrides that turn it on in a small model, for the table and its tests; (): the table leaves it out.
      also: names of features that it is a kind of, whose exclusions it shares.
      excludes: features that it cannot be combined with. Each pair is declared once, by one of the two.
      remarks: features that it works with slower, or within limits.
      fixed: set if a run that goes on keeps the section.
    """

    name: str
    section: str
    used: Callable[[Any], bool]
    turn_on: tuple[str, ...] = ()
    excludes: tuple[Excludes, ...] = ()
    remarks: tuple[Remark, ...] = ()
    also: tuple[str, ...] = ()
    fixed: Fixed | None = None

    def refuse(self, others: Iterable[str], way_out: str) -> None:
        """Raise ConfigError if one of the named features is excluded: for objects made without a configuration.

        Args:
          others: names of the features that are used with this one.
          way_out: end of the message, such as "set parallel.workers=1".
        """
        found = set(others)
        for excluded in self.excludes:
            if excluded.other in found:
                raise ConfigError(
                    f"{self.name} cannot be combined with {excluded.other}, because {excluded.reason}; {way_out}."
                )


def conflicts(features: Sequence[Feature], sections: Mapping[str, Any]) -> list[str]:
    """Return the message of each pair of features that a configuration uses and that exclude each other.

    Args:
      features: the table of features, in the order in which messages are wanted.
      sections: section name -> section.
    """
    used = [feature for feature in features if feature.used(sections[feature.section])]
    names = {feature.name for feature in used}
    return [
        _Values().vformat(excluded.message, (), sections)
        for feature in used
        for excluded in feature.excludes
        if excluded.other in names
    ]


def fixed_sections(features: Sequence[Feature]) -> dict[str, Fixed]:
    """Return the sections that a run keeps when it goes on, with what each must not change."""
    return {feature.section: feature.fixed for feature in features if feature.fixed is not None}


def find_exclusion(features: Sequence[Feature], one: Feature, other: Feature) -> Excludes | None:
    """Return the declaration that two features of the table exclude each other, whichever declares it; None if none."""
    first = {one.name, *one.also}
    second = {other.name, *other.also}
    for feature in features:
        for wanted in (second if feature.name in first else (), first if feature.name in second else ()):
            for excluded in feature.excludes:
                if excluded.other in wanted:
                    return excluded
    return None


def find_remark(one: Feature, other: Feature) -> Remark | None:
    """Return the remark on two features that work together slower or within limits; None if there is none."""
    for feature, wanted in ((one, other.name), (other, one.name)):
        for remark in feature.remarks:
            if remark.other == wanted:
                return remark
    return None


def are_alternatives(one: Feature, other: Feature) -> bool:
    """Return True if two features are values of one setting, such as two optimizers."""
    first, second = (dict(override.split("=", 1) for override in feature.turn_on) for feature in (one, other))
    return any(first[key] != second[key] for key in first.keys() & second.keys())


class _Values(string.Formatter):
    """Formats values of a configuration as YAML writes them: true, false, null."""

    def format_field(self, value: Any, format_spec: str) -> str:
        words = {True: "true", False: "false", None: "null"}
        return words[value] if value is None or isinstance(value, bool) else super().format_field(value, format_spec)
