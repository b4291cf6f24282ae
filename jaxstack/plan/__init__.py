"""Plans parallel layouts: feasibility rules, automatic choice, and forecasts for clusters that are not present."""
