"""Hugging Face checkpoints: what their config.json says and where their tensors lie, one file a group of families."""
