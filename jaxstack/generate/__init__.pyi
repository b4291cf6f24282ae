from .decode import Decoder as Decoder
from .sampling import Sampling as Sampling
from .sampling import sample as sample
