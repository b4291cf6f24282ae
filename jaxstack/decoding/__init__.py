"""Sampling text from trained models."""
