"""Sets up JAX before it uses a device: simulated devices, memory limits, a private compilation cache."""

import contextlib
import ctypes
import os
from pathlib import Path

import jax

from jaxstack.distributed.cluster import full_count
from jaxstack.distributed.coordination import process_position
from jaxstack.errors import ConfigError


def start_devices(simulate: int | None = None) -> int:
    """Initialize JAX's devices, real or simulated on CPU, and return their number in the whole run.

    Args:
      simulate: number of simulated CPU devices of the run, which its processes share evenly, so that the run is the
        same on any number of processes. A run that goes on without some processes has no devices of theirs. None: the
        real devices.

    Raises:
      ConfigError: the backend cannot be initialized, or is already, with another number of simulated devices.
    """
    if simulate is not None:
        _, present = process_position()
        processes = full_count(present)
        if simulate % processes:
            raise ConfigError(
                f"parallel.simulate_devices ({simulate}) must be divisible by the number of processes ({processes})."
            )
        each = simulate // processes
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", each)
        except RuntimeError:
            if jax.device_count() != each * present:
                raise ConfigError(
                    f"parallel.simulate_devices ({simulate}) must be set before JAX is used in this process, which "
                    f"already has {jax.device_count()} devices."
                ) from None
    for option, name in (("jax_enable_x64", "JAX_ENABLE_X64"), ("jax_disable_jit", "JAX_DISABLE_JIT")):
        if getattr(jax.config, option):
            raise ConfigError(f"{name} is set, with which the train step does not compile; unset it (unset {name}).")
    if simulate or os.environ.get("JAX_PLATFORMS") == "cpu" or not Path("/proc/driver/nvidia").exists():
        keep_freed_memory()  # before the backend's threads allocate arenas
    use_whole_memory()
    try:
        return jax.device_count()
    except (RuntimeError, AssertionError) as error:  # JAX only asserts that a platform that was asked for is there
        asked = f"there is none for JAX_PLATFORMS={jax.config.jax_platforms}; unset it, or install the plugin for it"
        raise ConfigError(f"JAX finds no usable device: {(str(error) or asked).splitlines()[0]}") from None


DEVICE_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_NEWER_DEVICE_MEMORY = "XLA_CLIENT_MEM_FRACTION"
"""The same in newer versions of jaxlib, which refuse to start a GPU with both."""
DEVICE_FRACTION = 0.92
"""Share of a GPU's memory that XLA may allocate; the rest is for CUDA, NCCL and code."""
HOST_MEMORY = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def use_whole_memory() -> None:
    """Let XLA use nearly all GPU memory and all host memory, unless the user has set these limits.

    Their defaults are three quarters of a GPU's memory and 64 GiB of the host's. `model.remat: offload` at a million
    tokens needs more of the host's for each device.
    """
    if not os.environ.get(_NEWER_DEVICE_MEMORY):
        os.environ.setdefault(DEVICE_MEMORY, str(DEVICE_FRACTION))
    memory = host_memory()
    if memory is not None:
        os.environ.setdefault(HOST_MEMORY, str(max(1, memory // 2**30)))


def host_memory() -> int | None:
    """Return the memory of this host in bytes, or the limit of its control group (cgroup); None if unknown."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def memory_per_device() -> int | None:
    """Return the bytes that XLA may allocate on each local device, of the one with the least; None if unknown.

    The CPU devices of a process share the host's memory.
    """
    limits = [int((device.memory_stats() or {}).get("bytes_limit") or 0) for device in jax.local_devices()]
    if all(limits):
        return min(limits)
    memory = host_memory() if jax.local_devices()[0].platform == "cpu" else None
    return None if memory is None else memory // jax.local_device_count()


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory instead of returning it to the operating system; without glibc, do nothing.

    XLA's CPU backend allocates the temporaries of a step anew at every call. Blocks over 32 MB, and those in the arenas
    of its threads, would cause page faults in each step: a quarter of a small model's step time.
    """
    trim_threshold = -1
    mmap_max = -4
    arena_max = -8
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(arena_max, 1)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def cache_compilations() -> Path | None:
    """Enable JAX's persistent compilation cache in a private directory, `jaxstack/compiled` in the user's cache.

    The cache holds native code, so the directory must belong to this user and be closed to others (mode 0700). The
    user's own setting, `JAX_COMPILATION_CACHE_DIR`, takes precedence.

    Returns:
      The directory, or None if it cannot be made private.
    """
    if chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(chosen)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = home / "jaxstack" / "compiled"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.stat().st_uid != os.getuid():
            return None
        path.chmod(0o700)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return path
