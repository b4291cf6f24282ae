"""The loss of a language model's head: `api.linear_cross_entropy` chooses among this folder's backends."""
