"""Two processes that meet and add a number up: `meeting.py`, placed by the environment. Ends when its input does."""

import sys

import jax

from jaxstack.distributed.cluster import find_place
from jaxstack.distributed.coordination import all_gather, connect
from tests.reliability.runs import listening

place = find_place()
assert place is not None
jax.config.update("jax_num_cpu_devices", 1)
connect(place, connect_seconds=int(sys.argv[1]))
mesh = jax.make_mesh((place.count,), ("d",))
ones = jax.jit(lambda: jax.numpy.ones(place.count), out_shardings=jax.NamedSharding(mesh, jax.P("d")))()
total = jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))(ones)
told = all_gather("index", place.index)
assert all_gather("index", [-place.index]) == [[-other] for other in told], (
    "a name can be used again, for another value"
)
print("together", int(total), told, listening(), flush=True)
sys.stdin.read()
