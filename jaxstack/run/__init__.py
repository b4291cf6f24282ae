"""A training run as an object: built from a configuration, trained, loaded from its directory, evaluated, converted."""
