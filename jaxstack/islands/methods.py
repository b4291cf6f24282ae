"""The registry of methods for training on islands (device groups): DiLoCo, gossip, ..., each one file listed here."""

import functools
import operator
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from jaxstack.islands.base import IslandMethod
from jaxstack.islands.diloco import DiLoCo
from jaxstack.islands.folder import FolderDiLoCo
from jaxstack.islands.gossip import Gossip
from jaxstack.islands.local_sgd import LocalSGD
from jaxstack.islands.streaming import StreamingDiLoCo

METHODS = (DiLoCo, StreamingDiLoCo, LocalSGD, Gossip, FolderDiLoCo)
"""Every method that `islands.name` can choose. A new one is added here."""

if TYPE_CHECKING:
    AnyIslandMethod: TypeAlias = IslandMethod
else:
    AnyIslandMethod = Annotated[functools.reduce(operator.or_, METHODS), Field(discriminator="name")]
