"""Shapes of the serving engine's steps: those to compile, their durations, and the choice for waiting prompts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_SHORT = 64
"""Width of the rows for short prompts and the ends of long ones."""


class ChunkShape(NamedTuple):
    """Shape of the prompt tokens that a step computes: `rows` chunks of up to `width` tokens each."""

    rows: int
    width: int


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
    return tuple(sorted(shapes, key=lambda shape: (shape.rows * shape.width, shape.width)))


class StepSeconds(NamedTuple):
    """Measured durations of the engine's steps, in seconds, with all batch slots decoding.

    Attributes:
      decode: a step without prompt chunks.
      at_start: a step with chunks of each shape at the start of their prompts, whose attention reads few keys.
      at_end: the same with chunks at the end of the longest prompt that the engine takes.
    """

    decode: float
    at_start: Mapping[ChunkShape, float]
    at_end: Mapping[ChunkShape, float]

    def shapes_within(self, slowdown: float, depth: float) -> tuple[ChunkShape, ...]:
        """Return the chunk shapes that slow a decode step by at most the factor `slowdown`, or else the fastest one.

        Args:
          slowdown: largest duration relative to a step without chunks.
          depth: position of the chunks in their prompts, from 0, the start, to 1, the longest prompt's end. Attention
            reads all keys before a chunk, so that durations between the two measured ones grow linearly with it.
        """
        seconds = {shape: (1 - depth) * at + depth * self.at_end[shape] for shape, at in self.at_start.items()}
        limit = max(slowdown * self.decode, min(seconds.values()))
        return tuple(shape for shape, took in seconds.items() if took <= limit)


def widest_shapes(shapes: Sequence[ChunkShape]) -> list[ChunkShape]:
    """Return the shapes of at least as many tokens as the widest row has.

    Where nothing else runs, prompts that fill them are computed by programs without decoded rows: a lone prompt waits
    for no padding. Smaller shapes are computed beside decoded rows, so that fewer programs are compiled.
    """
    widest = max(shape.width for shape in shapes)
    return [shape for shape in shapes if shape.rows * shape.width >= widest]


def decode_batch_sizes(slots: int) -> tuple[int, ...]:
    """Return the decode batch sizes to compile, smallest first: `slots`, a quarter of it and so on, down to 2.

    A single row is padded to two, which is faster on a GPU; see `Decoder`.
    """
    counts = [slots]
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
    filled = [s for s in shapes if s.rows * s.width <= widest or 2 * covered[s] > s.rows * s.width]
    return max(filled or shapes, key=lambda shape: (covered[shape], -shape.rows * shape.width, shape.width))


def _covered(shape: ChunkShape, left: Sequence[int]) -> int:
    """Return the number of prompt tokens that a step computes with a chunk shape, given each prompt's tokens `left`."""
    rows = shape.rows
    covered = 0
    for tokens in left:
        taken = min(-(-tokens // shape.width), rows)
        covered = covered + min(tokens, taken * shape.width)
        rows = rows - taken
    return covered
