from . import optim as optim
from .config.sections import TrainConfig as TrainConfig
from .loss import LossSum as LossSum
from .optim import schedules as schedules
from .run.evaluate import evaluate as evaluate
from .run.load import generate as generate
from .run.load import load as load
from .run.train import train as train
from .run_config import load_config as load_config
from .trainer import Trainer as Trainer

__version__: str
