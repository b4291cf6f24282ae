"""A type for configuration fields whose allowed values are the keys of a table, such as `NORMS`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclasses.dataclass(frozen=True, eq=False)
class NameIn:
    """Annotation of a string field that accepts only a table's names: `norm: Annotated[str, NameIn(NORMS)]`."""

    table: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """The accepted names, in the order of the table."""
        return list(self.table)

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(self.names)
