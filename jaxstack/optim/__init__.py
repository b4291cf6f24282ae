"""Optimizers and learning-rate schedules that are chosen by configuration, built on Optax."""
