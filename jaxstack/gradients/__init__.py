"""Loss and gradients of a global batch: over microbatches, over devices, and through the stages of a pipeline."""
