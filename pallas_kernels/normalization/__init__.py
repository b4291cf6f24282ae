"""RMSNorm and LayerNorm with one-pass gradients."""
