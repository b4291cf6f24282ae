"""Mixture of experts: routing of tokens, expert parallelism, and configuration.

`router` chooses the experts of each token, `exchange` sorts tokens by expert and sends them between devices.
"""
