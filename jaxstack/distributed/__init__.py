"""Processes, devices and XLA options of a run: discovery of the cluster, coordination, start-up."""
