"""Keeps runs alive and correct: signals, skipped steps, checksums of replicas, checks before the first step."""
