"""jaxstack: trains language models on NVIDIA GPUs with JAX. Submodules are imported when they are first used."""

import lazy_loader as lazy

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
