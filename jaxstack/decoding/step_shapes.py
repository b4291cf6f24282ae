"""Shapes of the serving engine's steps: those to compile, their durations, and the choice for waiting prompts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_SHORT = 64
"""Width of the rows for short prompts and the ends of long ones."""
_MANY_ROWS = 256
"""Decoded rows from which on products, and not the reading of weights, take most of a GPU's time for a step."""


class ChunkShape(NamedTuple):
    """Shape of the prompt tokens that a step computes: `rows` chunks of up to `width` tokens each."""

    rows: int
    width: int

    @property
    def tokens(self) -> int:
        """Largest number of tokens, padding included."""
        return self.rows * self.width


class StepKind(NamedTuple):
    """Steps that run the same programs, apart from the way in which they sample.

    Attributes:
      drafts: they have drafts.
      rows: number of decoded rows, padding included.
      shape: shape of the chunks of prompts; None: there are none.
      adapted: a request uses an adapter.
    """

    drafts: bool
    rows: int
    shape: ChunkShape | None = None
    adapted: bool = False


class StepShapes(NamedTuple):
    """Shapes of an engine's steps, for which programs are compiled.

    Attributes:
      decode: numbers of decoded rows, smallest first; the last is the number of slots.
      chunks: shapes of prompt chunks, smallest first.
      constant_steps: see `Programs`.
    """

    decode: tuple[int, ...]
    chunks: tuple[ChunkShape, ...]
    constant_steps: bool = False


def chunk_shapes(tokens: int, slots: int, together: int | None = None) -> tuple[ChunkShape, ...]:
    """Return the shapes of prompt-token batches to compile, smallest first.

    There are shapes of `tokens`, half and a quarter of them: one row for a long prompt, and several for short ones; and
    one of several rows of `tokens`.

    Args:
      tokens: largest number of tokens of one prompt per step.
      slots: largest number of rows.
      together: largest number of tokens of several prompts per step; None: `tokens`.
    """
    short = min(_SHORT, tokens)
    shapes = {ChunkShape(1, short)}
    for total in (tokens, tokens // 2, tokens // 4):
        if total >= short:
            shapes |= {ChunkShape(1, total), ChunkShape(min(total // short, slots), short)}
    shapes.add(ChunkShape(max(1, min((together or tokens) // tokens, slots)), tokens))
    return tuple(sorted(shapes, key=lambda shape: (shape.tokens, shape.width)))


_NEAR = 1024
"""Tokens within which chunks take about as long wherever they are."""


def timed_depths(longest: int) -> list[float]:
    """Return where chunks end when they are timed, as shares of the longest prompt: 1, a half, a quarter and so on."""
    depths = [1.0]
    while depths[0] * longest >= 2 * _NEAR:
        depths.insert(0, depths[0] / 2)
    return depths


class StepSeconds(NamedTuple):
    """Measured durations of the engine's steps, in seconds, with all batch slots decoding.

    Attributes:
      decode: a step without prompt chunks.
      chunks: a step with chunks of each shape, by the depth at which they end: the share of the longest prompt that the
        engine takes. Ascending; the last is 1.
    """

    decode: float
    chunks: Mapping[float, Mapping[ChunkShape, float]]

    def shapes_within(self, slowdown: float, depth: float) -> tuple[ChunkShape, ...]:
        """Return the chunk shapes that slow a decode step by at most the factor `slowdown`, or else the fastest one.

        Attention reads all keys before a chunk, and where no kernel copies them, as many as the next of a few sizes has
        are copied. So a chunk counts as long as one at the next depth that was measured.

        Args:
          slowdown: largest duration relative to a step without chunks.
          depth: where the chunks end, as a share of the longest prompt.
        """
        seconds = self.chunks[min((at for at in self.chunks if at >= depth), default=1.0)]
        limit = max(slowdown * self.decode, min(seconds.values()))
        return tuple(shape for shape, took in seconds.items() if took <= limit)


def widest_shapes(shapes: Sequence[ChunkShape]) -> list[ChunkShape]:
    """Return the shapes of at least as many tokens as the widest row has.

    Where nothing else runs, prompts that fill them are computed by programs without decoded rows: a lone prompt waits
    for no padding. Smaller shapes are computed beside decoded rows, so that fewer programs are compiled.
    """
    widest = max(shape.width for shape in shapes)
    return [shape for shape in shapes if shape.tokens >= widest]


def decode_batch_sizes(slots: int) -> tuple[int, ...]:
    """Return the decode batch sizes to compile, smallest first: `slots`, a quarter of it and so on, down to 2.

    Below many slots comes their half: the time of a step then grows with its rows, padding included. A single row is
    padded to two, which is faster on a GPU; see `Decoder`.
    """
    counts = [slots]
    if slots >= _MANY_ROWS:
        counts.append(-(-slots // 2))
    while counts[-1] > 2:
        counts.append(max(2, -(-counts[-1] // 4)))
    return tuple(reversed(counts))


def choose_shape(shapes: Sequence[ChunkShape], left: Sequence[int]) -> ChunkShape:
    """Return the chunk shape that computes the most prompt tokens, and among equals that with least padding.

    A shape of several rows of the largest width is chosen only if less than half of it is padding: otherwise computing
    the same tokens one row at a time takes no longer.

    Args:
      shapes: compiled shapes to choose from.
      left: tokens left of each prompt, in the order in which they are computed.
    """
    widest = max(shape.width for shape in shapes)
    covered = {shape: _covered(shape, left) for shape in shapes}
    filled = [s for s in shapes if s.tokens <= widest or 2 * covered[s] > s.tokens]
    return max(filled or shapes, key=lambda shape: (covered[shape], -shape.tokens, shape.width))


def _covered(shape: ChunkShape, left: Sequence[int]) -> int:
    """Return the number of prompt tokens that a step computes with a chunk shape, given each prompt's tokens `left`."""
    rows = shape.rows
    covered = 0
    for tokens in left:
        taken = min(-(-tokens // shape.width), rows)
        covered = covered + min(tokens, taken * shape.width)
        rows = rows - taken
    return covered
