from .config import ModelConfig as ModelConfig, RopeScaling as RopeScaling
from .count import count_parameters as count_parameters, model_flops_per_token as model_flops_per_token
from .preset import load_preset as load_preset, preset_names as preset_names
from .transformer import Transformer as Transformer
