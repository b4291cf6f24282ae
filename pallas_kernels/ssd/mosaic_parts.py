"""Parts that the Hopper kernels of the state space layer share: their constants, factors of tokens, and small parts.

Dims: B batch, T tokens, n chunks of C tokens, N heads of P channels, G groups, S state width.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels.attention.mosaic_scores import LOG2E
from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.pipeline import Ring
from pallas_kernels.hopper.wgmma import ROWS
from pallas_kernels.mosaic_api import Index, Ref, plgpu
from pallas_kernels.sequence_parts import in_chunks

Operand: TypeAlias = Any
"""An array; inside a kernel a reference to it in global memory."""
CHUNK = ROWS
"""Tokens of a chunk: the rows of one tensor-core product."""
CHANNELS = ROWS
"""Channels of a head, as the kernels see it; wider heads are several of these."""
FACTORS = 6
TOTAL, STEP, SEEN, ENDS, KEEP, TOTAL_AGAIN = range(FACTORS)
"""Rows of the factors of a chunk, see `make_factors`."""


@dataclass(frozen=True)
class SsdPlan:
    """Compile-time arguments of a Hopper kernel of the state space layer.

    Attributes:
        warpgroups: Computing warpgroups of a program.
        stages: Chunks in flight from global memory.
        programs: Programs that compute a head of the forward, see `pallas_kernels.hopper.replay`.
        interpret: True to interpret the kernel on a CPU.
        automatic_barriers: True to have the compiler put barriers around all accesses to shared memory.
    """

    warpgroups: int = 1
    stages: int = 3
    programs: int = 1
    interpret: bool = False
    automatic_barriers: bool = False

    @property
    def ring(self) -> Ring:
        """Circular shared-memory buffer through which the loading warpgroup passes chunks to the computing ones."""
        return Ring(self.stages, self.interpret)

    def compiler_params(self) -> Any:
        """Return the compiler options of the kernels.

        A warpgroup never loads what it has stored to shared memory, which only TMA and wgmma read, after `commit_smem`;
        and `wait_smem_to_gmem`, which has a barrier, is between a product and the next store to its operand.
        """
        return plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not self.automatic_barriers, reduction_scratch_bytes=0
        )


class Sequences(NamedTuple):
    """Inputs of the kernels.

    Attributes:
        x: [B, T, N, P] with P = `CHANNELS`.
        b, c: [B, T, G, S].
        factors: float32 [B, N, n, FACTORS, C], see `make_factors`.
        documents: int32 [B, n, 2, C], or None.
    """

    x: Operand
    b: Operand
    c: Operand
    factors: Operand
    documents: Operand | None


def make_factors(dt: jax.Array, decay: jax.Array, documents: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Return what the kernels multiply tokens by, float32 [B, N, n, FACTORS, C], and their documents [B, n, 2, C].

    The rows of the factors of a chunk are:

    - `TOTAL`: L log2(e), where L is the sum of the logarithms of the decay from the start of the chunk;
    - `STEP`: dt;
    - `SEEN`: what the state before the chunk is multiplied by for each token: exp(L), or 0 in a document that begins
      within the chunk;
    - `ENDS`: what the outer product of a token is multiplied by in the state after the chunk: exp(L_C - L) dt, or 0 in
      a document that ends within the chunk;
    - `KEEP`: what the state before the chunk is multiplied by in the state after it, the last of `SEEN`, C times;
    - `TOTAL_AGAIN`: the same as `TOTAL`.

    Totals and documents are given twice, because the compiler would merge two loads of one vector, for the rows and for
    the columns of a matrix, and cannot take one to the layout of the other.

    Args:
        dt: step sizes [B, T, N].
        decay: logarithms of the decay [B, T, N].
        documents: numbers of documents, int32 [B, T], or None.
    """
    step, decay = (jnp.moveaxis(in_chunks(z, CHUNK), -1, 1) for z in (dt, decay))
    total = jnp.cumsum(decay, axis=-1)
    seen = jnp.exp(total)
    ends = jnp.exp(total[..., -1:] - total) * step
    if documents is not None:
        documents = in_chunks(documents, CHUNK, "edge")
        last = documents[..., -1:]
        before = jnp.concatenate([documents[:, :1, :1], last[:, :-1]], axis=1)
        seen = jnp.where((documents == before)[:, None], seen, 0)
        ends = jnp.where((documents == last)[:, None], ends, 0)
        documents = jnp.stack([documents, documents], axis=-2)
    keep = jnp.broadcast_to(seen[..., -1:], seen.shape)
    total = total * LOG2E
    return jnp.stack([total, step, seen, ends, keep, total], axis=-2), documents


def row_factor(factors: Ref, kind: int, like: jax.Array) -> jax.Array:
    """Return a factor of a chunk's tokens, from shared memory [FACTORS, C], for each row of `like`."""
    return wgmma.broadcast_row_values(wgmma.load_rows(factors.at[kind]), like)


def column_factor(factors: Ref, kind: int, like: jax.Array) -> jax.Array:
    """Return a factor of a chunk's tokens, from shared memory [FACTORS, C], for each column of `like`."""
    return wgmma.broadcast_column_values(wgmma.load_columns(factors.at[kind]), like)


def scaled_rows(tokens: Ref, factors: Ref, kind: int) -> jax.Array:
    """Return rows of shared memory [C, P], each multiplied by its token's factor, float32."""
    values = plgpu.load(tokens, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    return values * row_factor(factors, kind, values)


def decays(factors: Ref, documents: Ref | None, like: jax.Array, queries_are_rows: bool = True) -> jax.Array:
    """Return the decay exp(L_i - L_j) from token j to token i of a chunk, 0 where j is after i or in another document.

    Args:
        factors: The factors of the chunk in shared memory, [FACTORS, C].
        documents: Document numbers of its tokens, [2, C], or None.
        like: An array of the shape and layout of the result, [C, C].
        queries_are_rows: True if i are the rows of the result, False if j are.
    """
    of_rows = row_factor(factors, TOTAL, like)
    of_columns = column_factor(factors, TOTAL_AGAIN, like)
    rows, columns = (plgpu.broadcasted_iota(jnp.int32, like.shape, d, layout=plgpu.Layout.WGMMA) for d in (0, 1))
    difference = of_rows - of_columns if queries_are_rows else of_columns - of_rows
    visible = rows >= columns if queries_are_rows else rows <= columns
    decay = jnp.where(visible, jnp.exp2(difference), 0.0)
    if documents is None:
        return decay
    of_rows = wgmma.broadcast_row_values(wgmma.load_rows(documents.at[0]), like)
    of_columns = wgmma.broadcast_column_values(wgmma.load_columns(documents.at[1]), like)
    return jnp.where(of_rows == of_columns, decay, 0.0)


def tokens_of(chunk: Index) -> Index:
    """Return the first token of a chunk."""
    return chunk * CHUNK
