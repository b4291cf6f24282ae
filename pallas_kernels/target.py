"""The device that a function is lowered for (its target), which determines the backends of operations.

The default is jax's default backend. Code that compiles ahead of time for another device declares it:

    with lowering_platform("cuda", compute_capability=(9, 0)):
        compiled = jax.jit(step).lower(state, batch).compile()

The context is part of jax's tracing cache key, so one jitted function can be traced for several targets.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax

_PLATFORMS = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda", "rocm": "rocm", "tpu": "tpu"}
_HOPPER_MULTIPROCESSORS = 132
_declared_target = jax.make_user_context(None)


@dataclass(frozen=True)
class Target:
    """A device that code is lowered for.

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        compute_capability: compute capability of a CUDA device, e.g. (9, 0) for Hopper; None on other platforms.
        declared: True if `lowering_platform` named the target, which this machine then need not have.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    declared: bool = False

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.platform
        return f"{self.platform} {self.compute_capability[0]}.{self.compute_capability[1]}"


def lowering_platform(platform: str, compute_capability: tuple[int, int] | None = None) -> AbstractContextManager[None]:
    """Return a context in which backends are chosen for `platform`, whatever devices this machine has.

    Args:
        platform: "cpu", "cuda" (or "gpu"), "rocm" or "tpu".
        compute_capability: compute capability of the CUDA device; default (9, 0), Hopper.

    Raises:
        ValueError: the platform is unknown.
    """
    if platform not in _PLATFORMS:
        raise ValueError(f"platform {platform!r} is unknown: give one of {', '.join(map(repr, _PLATFORMS))}")
    name = _PLATFORMS[platform]
    if name == "cuda" and compute_capability is None:
        compute_capability = (9, 0)
    return _declared_target(Target(name, compute_capability, declared=True))


def current_target() -> Target:
    """Return the target declared by `lowering_platform`, or the first device of jax's default backend."""
    declared = _declared_target.value
    if declared is not None:
        return declared
    backend = str(jax.default_backend())
    platform = _PLATFORMS.get(backend, backend)
    if platform != "cuda":
        return Target(platform)
    version = str(getattr(jax.local_devices()[0], "compute_capability", "0.0"))
    if "rocm" in str(getattr(jax.local_devices()[0].client, "platform_version", "")):
        return Target("rocm")
    major, minor = version.split(".")[:2]
    return Target("cuda", (int(major), int(minor)))


def device_kind() -> str:
    """Return jax's name of the target device, e.g. "NVIDIA H200", or "" when compiling for an absent device."""
    return "" if _declared_target.value is not None else str(jax.local_devices()[0].device_kind)


def automatic_axes() -> dict[str, int]:
    """Return the mesh axes, as name -> size, over which XLA (not `shard_map`) partitions the code being traced.

    Only a mesh in context is visible: `jax.set_mesh`, or a surrounding `shard_map` that takes some of the axes. Under
    `jax.jit` with sharded arguments and no mesh in context the result is empty.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return {name: size for name, size in mesh.shape.items() if size > 1 and name not in mesh.manual_axes}


def multiprocessors() -> int:
    """Return the number of multiprocessors of this machine's first GPU if it is the target, else 132 (an H100's)."""
    declared = _declared_target.value
    if declared is None and jax.default_backend() == "gpu":
        return int(getattr(jax.local_devices()[0], "core_count", _HOPPER_MULTIPROCESSORS))
    return _HOPPER_MULTIPROCESSORS
