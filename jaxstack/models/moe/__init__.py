"""Mixture of experts: the experts of a token (`router`), its rows (`dispatch`), their way between devices (`exchange`)."""
