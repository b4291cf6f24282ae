"""Methods of training on islands, which are groups of devices joined by slow links: DiLoCo, gossip and others."""
