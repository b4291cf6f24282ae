"""Checkpoints of training runs: saved asynchronously, verified by file hashes, restored onto any mesh."""
