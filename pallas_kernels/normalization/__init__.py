"""RMSNorm and LayerNorm with gradients in one pass over memory."""
