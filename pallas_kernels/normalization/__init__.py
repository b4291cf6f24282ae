"""RMSNorm and LayerNorm, whose backward computes all gradients in one pass over memory."""
