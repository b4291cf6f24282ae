"""Every test sees eight simulated CPU devices, so that parallel layouts can be checked on any machine."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
