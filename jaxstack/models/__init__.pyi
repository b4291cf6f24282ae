from .config import ModelConfig as ModelConfig
from .config import RopeScaling as RopeScaling
from .count import count_parameters as count_parameters
from .count import model_flops_per_token as model_flops_per_token
from .preset import load_preset as load_preset
from .preset import preset_config as preset_config
from .preset import preset_names as preset_names
from .transformer import Transformer as Transformer
