"""Starts the processes of a node, watches them, and starts them again. No jax: it must outlive what jax does."""
