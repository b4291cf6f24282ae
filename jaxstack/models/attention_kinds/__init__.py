"""One file an attention kind; the table is all that knows them."""

from typing import Annotated

from pydantic import Field

from jaxstack.models.attention_kinds.block_sparse import BlockSparseAttention
from jaxstack.models.attention_kinds.linear import LinearAttention
from jaxstack.models.attention_kinds.longformer import LongformerAttention
from jaxstack.models.attention_kinds.performer import PerformerAttention
from jaxstack.models.attention_kinds.projected import ProjectedAttention
from jaxstack.models.attention_kinds.softmax import SoftmaxAttention

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
