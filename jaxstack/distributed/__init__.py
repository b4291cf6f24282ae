"""Sets up the processes and devices of a run: cluster detection, coordination of processes, XLA options."""
