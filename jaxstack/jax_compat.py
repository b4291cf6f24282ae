"""Private or version-dependent parts of jax, in one place, so that an upgrade of jax is a change to this file."""
