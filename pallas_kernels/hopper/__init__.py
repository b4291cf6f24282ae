"""Building blocks of all Hopper kernels: tiled matmul, load pipeline, tile scheduling, tensor-core products."""
