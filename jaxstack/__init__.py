"""jaxstack: trains language models on NVIDIA GPUs with JAX. Imports nothing heavy until it is asked for."""

import lazy_loader as lazy

__version__ = "0.1.0"



__getattr__, __dir__, _exported = lazy.attach(
    __name__, submod_attrs={"trainer": ["Trainer"], "run_config": ["load_config"]}
)
__all__ = ["Trainer", "load_config", "__version__"]
