"""The registry of compression methods. Each method is one file, listed here."""

import functools
import operator
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from jaxstack.compress.methods.base import Keep, Method
from jaxstack.compress.methods.rtn import Rtn

METHODS = (Rtn, Keep)
"""Every method that a recipe can choose. A new one is added here."""

if TYPE_CHECKING:
    AnyMethod: TypeAlias = Method
else:
    AnyMethod = Annotated[functools.reduce(operator.or_, METHODS), Field(discriminator="method")]
