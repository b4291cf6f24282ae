"""The Transformer and its components."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "config": ["ModelConfig", "RopeScaling"],
        "count": ["count_parameters", "model_flops_per_token"],
        "preset": ["load_preset", "preset_names"],
        "transformer": ["Transformer"],
    },
)
