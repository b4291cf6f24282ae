"""Normalisation, rotary embedding and gated activation in plain XLA, the only backend here.

These operations are bound by memory: the best that a kernel can do is to move every array once. XLA's fusions come near
to that alone (the share of the roofline that benchmarks/pointwise.py measures stands in docs/performance.md), and in a
model they fuse with what stands before and behind, which a kernel of our own, a custom call, would end.
"""
