"""All-gather times matrix, and matrix product times reduce-scatter, over the devices of an axis: `api`."""
