"""Normalisation, rotary embedding and gated activation in plain XLA, which fuses them with what is near."""
