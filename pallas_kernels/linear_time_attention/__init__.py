"""Attention through feature maps, in time linear in the length: `api.linear_attention`, `api.performer_attention`."""
