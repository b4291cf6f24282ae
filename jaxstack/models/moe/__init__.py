"""Mixture of experts: routing of tokens, expert parallelism, and configuration.

`router` chooses the experts of each token, `dispatch` the rows in which it is computed, and `exchange` sends rows
between devices.
"""
