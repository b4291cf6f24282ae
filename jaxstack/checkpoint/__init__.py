"""Checkpoints: asynchronous saves, content hashes checked on load, restore on another mesh."""
