"""One file an attention kind; the table is all that knows them."""

from typing import Annotated

from pydantic import Field

from jaxstack.models.attention_kinds.block_sparse import BlockSparse
from jaxstack.models.attention_kinds.linear import Linear
from jaxstack.models.attention_kinds.longformer import Longformer
from jaxstack.models.attention_kinds.performer import Performer
from jaxstack.models.attention_kinds.softmax import Softmax

ATTENTION_KINDS = (Softmax, Longformer, BlockSparse, Linear, Performer)
AnyAttention = Annotated[Softmax | Longformer | BlockSparse | Linear | Performer, Field(discriminator="name")]
