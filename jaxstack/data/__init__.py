"""Text to token batches: sources, tokenizers, verified shards, packing, a global order that the seed alone
decides.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
