"""Plans a run on a cluster that need not be present: its layout, memory, step time and cost."""
