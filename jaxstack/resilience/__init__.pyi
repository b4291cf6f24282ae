from .config import ResilienceConfig as ResilienceConfig
from .signals import Interrupted as Interrupted
from .signals import StopRequest as StopRequest
