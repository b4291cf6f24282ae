"""A configuration field whose values are the names of a table, so that a new row needs no second edit."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclasses.dataclass(frozen=True, eq=False)
class NameIn:
    """Annotation of a string that must be a name of a table, as in `norm: Annotated[str, NameIn(NORMS)]`."""

    table: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """Names of the table, in its order."""
        return list(self.table)

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(self.names)
