"""What a configuration would do on a cluster that need not be there."""
