"""Attention in time linear in the length: softmax scores are replaced by products of feature maps of q and k."""
