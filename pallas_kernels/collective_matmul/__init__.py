"""Matrix products whose operand is gathered from, or whose result is scattered to, the devices of an axis: `api`."""
