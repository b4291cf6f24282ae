"""Triton kernel that copies the keys and values of sequences from the pages of a cache."""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl


@triton.jit
def _copy_tokens(pages, copies, source, target, valid, elements: tl.constexpr, piece: tl.constexpr):
    """Copy tokens with so many numbers from the vectors `source` of the cache to the vectors `target` of the copies."""
    for start in tl.static_range(0, elements, piece):
        element = start + tl.arange(0, piece)
        both = valid[:, None] & (element < elements)[None]
        numbers = tl.load(pages + source[:, None] * elements + element[None], both, 0.0)
        tl.store(copies + target[:, None] * elements + element[None], numbers.to(copies.dtype.element_ty), both)


@triton.jit
def copy_kernel(keys, values, table, lengths, key_copies, value_copies, plan: tl.constexpr):
    """Copy some neighbouring slots of a row, unless all are far before its first token.

    The program ids are the block of slots and the row. `keys` and `values` are [P, page, numbers of a token], `table`
    is int32 [R, pages], `lengths` int32 [R], and the copies are [R, width, numbers of a token].
    """
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * plan.slots
    before = tl.load(lengths + row) - plan.width  # the token of slot 0, negative if there is none
    if first + plan.slots + before > -plan.margin:
        slot = first + tl.arange(0, plan.slots)
        valid = slot < plan.width
        token = tl.maximum(slot + before, 0)
        page = tl.load(table + row * plan.pages + token // plan.page_size, valid, 0).to(tl.int64)
        source = page * plan.page_size + token % plan.page_size
        target = row * plan.width + slot
        _copy_tokens(keys, key_copies, source, target, valid, plan.key_elements, plan.piece)
        _copy_tokens(values, value_copies, source, target, valid, plan.value_elements, plan.piece)
