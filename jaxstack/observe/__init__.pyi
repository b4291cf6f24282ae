from .collectives import (
    Collective as Collective,
)
from .collectives import (
    collectives as collectives,
)
from .collectives import (
    fp8_matmuls as fp8_matmuls,
)
from .collectives import (
    matmuls as matmuls,
)
from .collectives import (
    summarise as summarise,
)
from .config import ObserveConfig as ObserveConfig
from .environment import describe_environment as describe_environment
from .environment import write_environment as write_environment
from .memory import peak_memory_bytes as peak_memory_bytes
from .profile import StepProfiler as StepProfiler
from .progress import Progress as Progress
from .report import write_report as write_report
from .throughput import Meter as Meter
from .throughput import dense_bf16_peak as dense_bf16_peak
from .throughput import throughput as throughput
from .trackers import (
    JsonLines as JsonLines,
)
from .trackers import (
    MLflow as MLflow,
)
from .trackers import (
    TensorBoard as TensorBoard,
)
from .trackers import (
    Tracker as Tracker,
)
from .trackers import (
    Trackers as Trackers,
)
from .trackers import (
    WandB as WandB,
)
from .trackers import (
    open_trackers as open_trackers,
)
