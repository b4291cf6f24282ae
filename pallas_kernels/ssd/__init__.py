"""The state space layer of Mamba-2 (SSD): a recurrence with a state of fixed size, computed in chunks of tokens."""
