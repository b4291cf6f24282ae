"""One file an attention kind; the table is all that knows them."""

from typing import Annotated

from pydantic import Field

from jaxstack.models.attention.block_sparse import BlockSparseAttention
from jaxstack.models.attention.linear import LinearAttention
from jaxstack.models.attention.longformer import LongformerAttention
from jaxstack.models.attention.performer import PerformerAttention
from jaxstack.models.attention.projected import ProjectedAttention
from jaxstack.models.attention.softmax import SoftmaxAttention

ATTENTION_KINDS = (
    SoftmaxAttention,
    LongformerAttention,
    BlockSparseAttention,
    LinearAttention,
    PerformerAttention,
    ProjectedAttention,
)
AnyAttention = Annotated[
    SoftmaxAttention
    | LongformerAttention
    | BlockSparseAttention
    | LinearAttention
    | PerformerAttention
    | ProjectedAttention,
    Field(discriminator="name"),
]
