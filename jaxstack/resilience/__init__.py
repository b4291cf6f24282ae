"""Keeps training runs alive and correct: stop signals, skipped steps, checks of replicas, checks at the start."""
