from .run.load import load as load
from .run_config import load_config as load_config
from .trainer import Trainer as Trainer

__version__: str
