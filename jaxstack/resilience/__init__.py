"""Stopping on signals and limits on anomalies."""
