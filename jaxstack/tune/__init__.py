"""Hyperparameter tuning: Bayesian search over configuration values, learning-rate finder, coordinate check of muP."""
