"""Methods that keep the parameters of islands together: groups of devices that are joined by slow links."""
