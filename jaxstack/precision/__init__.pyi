from .config import PrecisionConfig as PrecisionConfig
