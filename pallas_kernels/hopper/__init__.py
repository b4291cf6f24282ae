"""Building blocks that all Mosaic GPU kernels for Hopper share."""
