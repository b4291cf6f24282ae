"""Triton kernel that turns a row of logits into its gradient in place, in two passes: the second reads from cache."""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def gradient_kernel(logits, labels, d_losses, gradient, losses, plan: tl.constexpr):
    """Overwrite one token's row of the logits [rows, V] with its gradient, and store the token's loss.

    The row is `program_id`; labels, d_losses and losses are [rows].

    Eight neighbours share a maximum: this costs one additional exponential per group of eight, not per logit.
    """
    count: tl.constexpr = plan.groups
    vocabulary: tl.constexpr = plan.vocabulary
    log2e: tl.constexpr = plan.log2e
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    d_loss = tl.load(d_losses + row)
    known = (label >= 0) & (label < vocabulary)
    # Loaded first, because other warps may already overwrite it in the second loop when this one ends the first.
    chosen = tl.load(logits + row * vocabulary + tl.where(known, label, 0)).to(tl.float32)
    groups = tl.arange(0, count)
    members = tl.arange(0, 8)
    inside = groups[:, None] * 8 + members[None, :]

    peak = tl.full([count], -1e30, tl.float32)
    total = tl.zeros([count], tl.float32)
    for block in range(plan.blocks):
        columns = block * count * 8 + inside
        here = columns < vocabulary
        x = tl.load(logits + row * vocabulary + columns, here, float("-inf"), eviction_policy="evict_last")
        x = x.to(tl.float32) * log2e
        higher = tl.maximum(peak, tl.max(x, axis=1))
        total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(x - higher[:, None]), axis=1)
        peak = higher
    top = tl.max(peak, axis=0)
    log2_sum = top + tl.log2(tl.sum(total * tl.exp2(peak - top), axis=0))
    lse = log2_sum / log2e

    loss = tl.where(known, lse + plan.z_loss * lse * lse - chosen, float("nan"))
    tl.store(losses + row, tl.where(label == plan.ignore_index, 0.0, loss))

    d_loss = tl.where(label == plan.ignore_index, 0.0, d_loss)
    d_lse = d_loss * (1.0 + 2.0 * plan.z_loss * lse)
    for step in range(plan.blocks):
        columns = (plan.blocks - 1 - step) * count * 8 + inside  # what was read last is most likely cached
        here = columns < vocabulary
        x = tl.load(logits + row * vocabulary + columns, here, float("-inf"), eviction_policy="evict_first")
        share = tl.exp2(x.to(tl.float32) * log2e - log2_sum) * d_lse
        share -= tl.where(columns == label, d_loss, 0.0)
        tl.store(gradient + row * vocabulary + columns, share.to(gradient.dtype.element_ty), here)
