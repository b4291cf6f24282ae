"""Normalisation, rotary embedding and gated activation in plain XLA, the only backend here.

These operations are bound by memory: the best that a kernel can do is to move every array once. How near to that XLA's
fusions come is what benchmarks/pointwise.py measures (docs/performance.md). In a model they also fuse with what stands
before and behind. A kernel of our own, a custom call, would end that: it would have to win more than it loses there.
"""
