from .config import ResilienceConfig as ResilienceConfig
from .signals import Interrupted as Interrupted, StopRequest as StopRequest
