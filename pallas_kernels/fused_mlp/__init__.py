"""The activation function of a feed-forward layer and the matmul after it, as one differentiable operation."""
