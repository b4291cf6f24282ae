"""Matmuls in FP8 with per-tensor or blockwise scaling, differentiable, as a `dot_general` for any Flax layer."""
