"""Studies over runs: Bayesian search of a configuration's values, and a learning-rate finder."""
