"""Attention by feature maps in time linear in the length: `api.linear_attention` and `api.performer_attention`."""
