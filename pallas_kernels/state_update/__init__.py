"""One step of decoding of recurrent mixers: `api.update_states` reads and writes each state once."""
