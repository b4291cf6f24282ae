"""Functions on training runs: build from a configuration, train, load, evaluate, generate text, convert."""
