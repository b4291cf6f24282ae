"""What a run shows: progress, metrics, throughput, memory, environment, collectives, profiles, report."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "collectives": ["Collective", "collectives", "fp8_matmuls", "matmuls", "summarise"],
        "config": ["ObserveConfig"],
        "environment": ["describe_environment", "write_environment"],
        "memory": ["peak_memory_bytes"],
        "profile": ["StepProfiler"],
        "progress": ["Progress"],
        "report": ["write_report"],
        "throughput": ["Meter", "dense_bf16_peak", "throughput"],
        "trackers": ["JsonLines", "TensorBoard", "Tracker", "Trackers", "WandB", "open_trackers"],
    },
)
