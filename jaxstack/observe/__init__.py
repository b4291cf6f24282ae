"""Reports on a run: metrics, throughput, memory, the compiled program, `report.html`."""
