from .collectives import (
    Collective as Collective,
    collectives as collectives,
    fp8_matmuls as fp8_matmuls,
    matmuls as matmuls,
    summarise as summarise,
)
from .config import ObserveConfig as ObserveConfig
from .environment import describe_environment as describe_environment, write_environment as write_environment
from .memory import peak_memory_bytes as peak_memory_bytes
from .profile import StepProfiler as StepProfiler
from .progress import Progress as Progress
from .report import write_report as write_report
from .throughput import Meter as Meter, dense_bf16_peak as dense_bf16_peak, throughput as throughput
from .trackers import (
    JsonLines as JsonLines,
    TensorBoard as TensorBoard,
    Tracker as Tracker,
    Trackers as Trackers,
    WandB as WandB,
    open_trackers as open_trackers,
)
