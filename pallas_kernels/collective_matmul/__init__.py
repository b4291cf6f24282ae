"""Matmuls fused with the all-gather before them or the reduce-scatter after them, over a mesh axis."""
