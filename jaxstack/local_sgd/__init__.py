"""Training on workers, groups of devices that train their own model copies and communicate rarely: DiLoCo, gossip..."""
