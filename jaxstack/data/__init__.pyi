from .build import prepare_tokens as prepare_tokens
from .compression import compression_baselines as compression_baselines
from .config import DataConfig as DataConfig, SourceConfig as SourceConfig, TokenizerConfig as TokenizerConfig
from .device import device_batches as device_batches, local_rows as local_rows
from .load_tokenizer import load_tokenizer as load_tokenizer
from .loader import Data as Data, open_data as open_data
from .shards import TokenStream as TokenStream, open_split as open_split
from .tokenizer import Tokenizer as Tokenizer
