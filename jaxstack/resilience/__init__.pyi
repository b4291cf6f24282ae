from .config import ResilienceConfig as ResilienceConfig
from .interval import advise_interval as advise_interval
from .interval import young_daly_seconds as young_daly_seconds
from .progress_file import ProgressFile as ProgressFile
from .signals import EndAtOnce as EndAtOnce
from .signals import Interrupted as Interrupted
from .signals import StopRequest as StopRequest
