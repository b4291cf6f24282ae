"""What a run shows: progress, metrics, throughput, memory, environment, collectives, profiles, report."""
