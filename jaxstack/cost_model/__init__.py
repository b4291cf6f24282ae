"""Predicts memory, step time and cost of a run on a cluster that need not be present, and searches its layouts."""
