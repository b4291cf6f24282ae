"""Starts and supervises the processes of a training command on one node."""
