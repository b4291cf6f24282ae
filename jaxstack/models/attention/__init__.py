"""Kinds of attention (softmax, linear, ...), one file each. A new kind is a file and a line of `AnyAttention`."""

from typing import Annotated, get_args

from pydantic import Field

from jaxstack.models.attention.block_sparse import BlockSparseAttention
from jaxstack.models.attention.gated import GatedAttention
from jaxstack.models.attention.gemma import GemmaAttention
from jaxstack.models.attention.latent import LatentAttention
from jaxstack.models.attention.linear import LinearAttention
from jaxstack.models.attention.longformer import LongformerAttention
from jaxstack.models.attention.performer import PerformerAttention
from jaxstack.models.attention.projected import ProjectedAttention
from jaxstack.models.attention.softmax import SoftmaxAttention
from jaxstack.models.attention.sparse_latent import SparseLatentAttention
from jaxstack.models.layer import Mixer

AnyAttention = Annotated[
    SoftmaxAttention
    | LongformerAttention
    | BlockSparseAttention
    | LinearAttention
    | PerformerAttention
    | ProjectedAttention
    | LatentAttention
    | SparseLatentAttention
    | GemmaAttention
    | GatedAttention,
    Field(discriminator="name"),
]
"""Attention of all layers of a model; in a configuration file its key `name` chooses the kind."""

ATTENTION_KINDS: tuple[type[Mixer], ...] = get_args(get_args(AnyAttention)[0])
"""The classes of `AnyAttention`."""
