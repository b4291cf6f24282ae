"""Optimizers and learning-rate schedules as data, built on Optax."""
