"""A language model's head and loss: `api.linear_cross_entropy` chooses among the backends of this folder."""
