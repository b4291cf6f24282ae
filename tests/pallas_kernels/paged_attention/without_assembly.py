"""What the assembly of the kernels of paged attention computes, by Triton's own operations."""

import triton
import triton.language as tl


@triton.jit
def first_of_pairs(pairs):
    return (((pairs << 8) & -32768) | ((pairs << 7) & 0x3F80)).to(tl.float16, bitcast=True)


@triton.jit
def second_of_pairs(pairs):
    return ((pairs & -32768) | ((pairs >> 1) & 0x3F80)).to(tl.float16, bitcast=True)
