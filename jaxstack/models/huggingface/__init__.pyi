from .families import FAMILIES as FAMILIES
from .family import Family as Family
from .load import from_huggingface as from_huggingface
from .load import read_model_config as read_model_config
from .load import read_parameters as read_parameters
from .save import to_huggingface as to_huggingface
from .save import write_checkpoint as write_checkpoint
