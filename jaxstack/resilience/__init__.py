"""Keeps training runs alive and correct: stop signals, skipped steps, replica comparison, start-up checks."""
