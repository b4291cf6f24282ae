"""The registry of compression methods. Each method is one file, listed here."""

import functools
import operator
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from jaxstack.compress.methods.awq import Awq
from jaxstack.compress.methods.base import Keep, Method
from jaxstack.compress.methods.bct import Bct
from jaxstack.compress.methods.bct_gptq import BctGptq
from jaxstack.compress.methods.bfp import BlockFloat
from jaxstack.compress.methods.fp8 import Fp8
from jaxstack.compress.methods.gptq import Gptq
from jaxstack.compress.methods.kmeans import KMeans
from jaxstack.compress.methods.lowrank import LowRank
from jaxstack.compress.methods.magnitude import Magnitude
from jaxstack.compress.methods.rtn import Rtn
from jaxstack.compress.methods.sparsegpt import SparseGpt
from jaxstack.compress.methods.wanda import Wanda

METHODS = (Rtn, Gptq, Awq, Fp8, BlockFloat, KMeans, Bct, BctGptq, Magnitude, Wanda, SparseGpt, LowRank, Keep)
"""Every method that a recipe can choose. A new one is added here."""

if TYPE_CHECKING:
    AnyMethod: TypeAlias = Method
else:
    AnyMethod = Annotated[functools.reduce(operator.or_, METHODS), Field(discriminator="method")]
