from .config import Fp8Rule as Fp8Rule
from .config import PrecisionConfig as PrecisionConfig
from .recipe import Fp8Matmul as Fp8Matmul
from .recipe import ScalingState as ScalingState
from .recipe import use_fp8 as use_fp8
