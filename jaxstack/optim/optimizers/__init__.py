"""One file an optimizer; the table is all that knows them."""

from typing import Annotated

from pydantic import Field

from jaxstack.optim.optimizers.adafactor import Adafactor
from jaxstack.optim.optimizers.adamw import AdamW
from jaxstack.optim.optimizers.lion import Lion
from jaxstack.optim.optimizers.muon import Muon
from jaxstack.optim.optimizers.sgd import SGD

OPTIMIZERS = (AdamW, Muon, Lion, Adafactor, SGD)
AnyOptimizer = Annotated[AdamW | Muon | Lion | Adafactor | SGD, Field(discriminator="name")]
