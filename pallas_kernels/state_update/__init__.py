"""Kernels of a decoding step of recurrent mixers: `api.update_states` reads and writes each state once."""
