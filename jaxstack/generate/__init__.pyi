from .decode import Decoder as Decoder
from .sampling import Sampling as Sampling, sample as sample
