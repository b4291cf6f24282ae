"""Hyperparameter tuning: Bayesian search, a learning-rate finder, and a check of muP (width-independent rates)."""
