"""What must be set before JAX touches a device: simulated devices, memory, a private compilation cache."""

import contextlib
import ctypes
import os
from pathlib import Path

import jax

from jaxstack.distributed.coordination import position
from jaxstack.errors import ConfigError


def start_devices(simulate: int | None = None) -> int:
    """Brings up the devices (simulated CPU devices where asked for) and returns their number in the whole run.

    The processes of a run divide the simulated devices, so that the run is the same on any number of them.

    Raises:
      ConfigError: the backend cannot be brought up, or is up already with another number of simulated devices.
    """
    if simulate is not None:
        _, processes = position()
        if simulate % processes:
            raise ConfigError(
                f"parallel.simulate_devices ({simulate}) must be divisible by the number of processes ({processes})."
            )
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", simulate // processes)
        except RuntimeError:
            if jax.device_count() != simulate:
                raise ConfigError(
                    f"parallel.simulate_devices ({simulate}) must be set before JAX is used in this process; it runs "
                    f"on {jax.device_count()} devices already."
                ) from None
    if simulate or os.environ.get("JAX_PLATFORMS") == "cpu" or not Path("/proc/driver/nvidia").exists():
        keep_freed_memory()  # before the backend's threads have arenas of their own
    use_whole_memory()
    try:
        return jax.device_count()
    except RuntimeError as error:
        raise ConfigError(f"JAX finds no usable device: {str(error).splitlines()[0]}") from None


DEVICE_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
DEVICE_FRACTION = 0.92
HOST_MEMORY = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def use_whole_memory() -> None:
    """Lets XLA have nearly all memory of the GPUs, where it takes three quarters, and of the host what there is, where
    it takes 64 GiB: `model.remat: offload` at a million tokens holds as much there for each device.

    What is left of a GPU's memory is for CUDA, NCCL and code. The user's own settings win.
    """
    os.environ.setdefault(DEVICE_MEMORY, str(DEVICE_FRACTION))
    memory = host_memory()
    if memory is not None:
        os.environ.setdefault(HOST_MEMORY, str(max(1, memory // 2**30)))


def host_memory() -> int | None:
    """Return the bytes of memory of this host, or of its control group where that has a limit; None if unknown."""
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


def memory_per_device() -> int | None:
    """Return the bytes that XLA may allocate on each local device, or None if unknown.

    The CPU devices of a process share the host's memory.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        return int(limit)
    memory = host_memory() if jax.local_devices()[0].platform == "cpu" else None
    return None if memory is None else memory // jax.local_device_count()


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory instead of giving it back to the kernel.

    XLA's CPU backend allocates a step's temporaries anew at every call; blocks over 32 MB, and those in the arenas of
    its threads, would cost their page faults again each step (a quarter of a small model's step time). Elsewhere than
    on glibc it does nothing.
    """
    trim_threshold, mmap_max, arena_max = -1, -4, -8
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(arena_max, 1)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def cache_compilations(directory: str | Path | None = None) -> Path | None:
    """Turns on JAX's persistent compilation cache in a private directory; returns it, or None where it cannot be had.

    The cache holds native code, so the directory must belong to us and be closed to others (mode 0700). A setting of
    the user's own (`JAX_COMPILATION_CACHE_DIR`) wins.
    """
    if chosen := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(chosen)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(directory) if directory else home / "jaxstack" / "compiled"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.stat().st_uid != os.getuid():
            return None
        path.chmod(0o700)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    return path
