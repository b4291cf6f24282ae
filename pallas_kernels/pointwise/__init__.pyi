from .gated import swiglu as swiglu
from .norm import layer_norm as layer_norm
from .norm import rms_norm as rms_norm
from .rotary import apply_rotary as apply_rotary
