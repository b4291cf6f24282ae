from .decode import Decoder as Decoder
from .decode import ModelOnMesh as ModelOnMesh
from .sampling import Sampling as Sampling
from .sampling import sample as sample
from .text import Piece as Piece
from .text import TextGenerator as TextGenerator
from .text import TextStream as TextStream
