"""Triton kernel that copies rows from host memory."""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def gather_rows_kernel(address, ids, out, plan: tl.constexpr):
    """Copy the table's rows `ids` to `out`, int32 [count, words]; neighbouring threads read neighbouring words.

    `address` is the address of the table, uint32 [2]. The program ids are a block of rows and a block of words.
    """
    block: tl.constexpr = plan.block
    block_rows: tl.constexpr = plan.block_rows
    low = tl.load(address).to(tl.uint64)
    high = tl.load(address + 1).to(tl.uint64)
    table = (low | (high << 32)).to(tl.int64).to(out.dtype)
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    word = tl.program_id(1) * block + tl.arange(0, block)
    number = tl.load(ids + row, row < plan.count, 0)
    number = tl.minimum(tl.maximum(number, 0), plan.rows - 1).to(tl.int64)
    valid = (row < plan.count)[:, None] & (word < plan.words)[None]
    content = tl.load(table + number[:, None] * plan.words + word[None], valid, 0)
    tl.store(out + row[:, None].to(tl.int64) * plan.words + word[None], content, valid)
