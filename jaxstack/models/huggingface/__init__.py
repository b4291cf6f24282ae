"""Import and export of Hugging Face checkpoints; one file per group of families maps their keys and tensors."""
