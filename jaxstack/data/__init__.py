"""Text to token batches: sources, tokenizers, verified shards, packing, a global order that the seed alone
decides.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "config": ["DataConfig", "SourceConfig", "TokenizerConfig"],
        "compression": ["compression_baselines"],
        "device": ["device_batches", "local_rows"],
        "loader": ["Data", "open_data"],
        "load_tokenizer": ["load_tokenizer"],
        "tokenizer": ["Tokenizer"],
        "shards": ["TokenStream", "open_split"],
        "build": ["prepare_tokens"],
    },
)
