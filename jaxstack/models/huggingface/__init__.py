"""Hugging Face checkpoints: a file per group of model families, which maps config.json and tensors to ours."""
