"""Matrix products in FP8: per-tensor and blockwise scaling, differentiable, as a `dot_general` for any Flax layer."""
