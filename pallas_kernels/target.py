"""Which device a function is being lowered for, as far as the choice of a backend needs to know.

By default that is jax's default backend. A function that is compiled ahead of time for another device says
so:

    with lowering_platform("cuda", compute_capability=(9, 0)):
        compiled = jax.jit(step).lower(state, batch).compile()

The context is part of jax's tracing cache key, so one jitted function can be traced for several targets.
"""

from dataclasses import dataclass
from typing import Any

import jax

_PLATFORMS = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda", "rocm": "rocm", "tpu": "tpu"}
_HOPPER_MULTIPROCESSORS = 132
_declared_target = jax.make_user_context(None)


@dataclass(frozen=True)
class Target:
    """A device that code is lowered for.

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        compute_capability: of a CUDA device, e.g. (9, 0) for Hopper; None elsewhere.
        declared: whether `lowering_platform` named it, so that it need not be a device of this machine.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    declared: bool = False

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.platform
        return f"{self.platform} {self.compute_capability[0]}.{self.compute_capability[1]}"


def lowering_platform(platform: str, compute_capability: tuple[int, int] | None = None) -> Any:
    """A context in which backends are chosen for `platform`, whatever devices this machine has.

    Args:
        platform: "cpu", "cuda" (or "gpu"), "rocm" or "tpu".
        compute_capability: of the CUDA device, (9, 0) (Hopper) where not given.

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
    """The target declared by `lowering_platform`, else the first device of jax's default backend."""
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
    """The name that jax gives the device that is lowered for, e.g. "NVIDIA H200"; "" where it is only declared."""
    return "" if _declared_target.value is not None else str(jax.local_devices()[0].device_kind)


def automatic_axes() -> dict[str, int]:
    """Axes, name -> size, over which what is being traced is partitioned by XLA and not by `shard_map`, where known.

    A function under `jax.jit` whose arguments alone are sharded does not know: only a mesh in context tells
    (`jax.set_mesh`, or a `shard_map` around that takes some of the axes).
    """
    mesh = jax.sharding.get_abstract_mesh()
    return {name: size for name, size in mesh.shape.items() if size > 1 and name not in mesh.manual_axes}


def most_programs() -> int:
    """How many programs a kernel starts at most whose programs loop over its tiles: one a multiprocessor, if alone.

    In a mesh of several devices collective operations hold some multiprocessors for a while. Programs that find no
    place would start when the others have ended, and the kernel take twice its time: there each tile has a program,
    and the hardware deals them out.
    """
    return multiprocessors() if jax.sharding.get_abstract_mesh().size == 1 else 2**31 - 1


def multiprocessors() -> int:
    """How many the target has, as far as this machine knows: those of its first GPU, else of an H100 or H200."""
    declared = _declared_target.value
    if declared is None and jax.default_backend() == "gpu":
        return int(getattr(jax.local_devices()[0], "core_count", _HOPPER_MULTIPROCESSORS))
    return _HOPPER_MULTIPROCESSORS
