"""Rotary embedding and gated activation in plain XLA, the only backend here.

These operations are bound by memory: no kernel can do better than move every array once.
benchmarks/kernels/pointwise.py measures how near XLA's fusions come to that (docs/performance.md). In a model XLA also
fuses them with the operations around them; a kernel of ours, a custom call, would end that, and would have to gain
more than that loses.
"""
