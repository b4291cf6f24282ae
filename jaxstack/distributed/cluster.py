"""Detects the processes and nodes of a run from environment variables or Slurm. Does not import jax."""

import argparse
import dataclasses
import ipaddress
import itertools
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxstack.errors import ConfigError

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
INDEX = "JAX_PROCESS_ID"
NODES = "JAXSTACK_NODES"
NODE_RANK = "JAXSTACK_NODE_RANK"
FULL_COUNT = "JAXSTACK_FULL_PROCESSES"
"""Number of processes that the configuration's layout is for, if the run may go on with fewer."""
FEWER_COUNT = "JAXSTACK_FEWER_PROCESSES"
"""Number of processes with which the run would go on after the loss of a node, if it may."""
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
INSECURE = "JAXSTACK_INSECURE"
TLS_FILES = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")
TLS_PEER_PREFIX = "JAX_MTLS_PEER_URI_PREFIX"
_GPU_NAME = re.compile(r"\d+|(?:GPU|MIG)-.+")
"""Name of a GPU in CUDA_VISIBLE_DEVICES: an index or a UUID."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of this process in its run: its index, the number of processes, and the coordinator's address.

    Attributes:
      coordinator: HOST:PORT at which process 0 can be reached.
      count: number of processes.
      index: index of this process, from 0.
      bind: address that process 0 listens on; None: that of `coordinator`, never every interface.
      local_devices: GPUs of this host that the process uses; None: all that it sees.
    """

    coordinator: str
    count: int
    index: int
    bind: str | None = None
    local_devices: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Position of this node in a run: its index, the number of nodes, and the coordinator's address.

    Attributes:
      count: number of nodes.
      rank: index of this node, from 0.
      coordinator: HOST:PORT of node 0; None with one node.
    """

    count: int = 1
    rank: int = 0
    coordinator: str | None = None


def find_place(environ: Mapping[str, str] | None = None) -> Place | None:
    """Detect this process's index in its run and the coordinator's address; None if it is the only process.

    Reads JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which the launcher sets, then the variables of
    `srun`.

    Args:
      environ: environment variables; default: `os.environ`.

    Raises:
      ConfigError: the variables contradict one another, or one of them is missing.
    """
    environ = os.environ if environ is None else environ
    if COUNT in environ or INDEX in environ:
        missing = [name for name in (COORDINATOR, COUNT, INDEX) if not environ.get(name)]
        if missing:
            raise ConfigError(f"several processes need {COORDINATOR}, {COUNT} and {INDEX}; missing: {missing}.")
        count = _number(environ, COUNT)
        index = _number(environ, INDEX)
        place = Place(environ[COORDINATOR], count, index, environ.get(BIND), _device_list(environ.get(LOCAL_DEVICES)))
    elif (tasks := _number(environ, "SLURM_STEP_NUM_TASKS", 1)) > 1:
        place = Place(
            environ.get(COORDINATOR) or slurm_coordinator(environ),
            tasks,
            _number(environ, "SLURM_PROCID"),
            environ.get(BIND),
            _slurm_devices(environ),
        )
    else:
        return None
    if not 0 <= place.index < place.count:
        raise ConfigError(f"the process index ({place.index}) must lie in 0..{place.count - 1}.")
    split_address(place.coordinator)
    return place if place.count > 1 else None


def on_first_process(body: Callable[[], int | None]) -> Callable[[], int | None]:
    """Return a command's body that does nothing on the further processes of a job, for work that one process does."""

    def run() -> int | None:
        place = find_place()
        return body() if place is None or place.index == 0 else None

    return run


def full_count(count: int, environ: Mapping[str, str] | None = None) -> int:
    """Return the number of processes that the run's layout is for: `count`, or more if it goes on without some nodes.

    Args:
      count: number of processes of the run now.
      environ: environment variables; default: `os.environ`.
    """
    return _number(os.environ if environ is None else environ, FULL_COUNT, count)


def fewer_count(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the number of processes with which the run would go on after the loss of a node; None if it would not.

    Args:
      environ: environment variables; default: `os.environ`.
    """
    environ = os.environ if environ is None else environ
    return _number(environ, FEWER_COUNT) if FEWER_COUNT in environ else None


def find_nodes(environ: Mapping[str, str] | None = None) -> Nodes:
    """Detect this node's index and the number of nodes, from Slurm, an indexed Kubernetes job or the launcher.

    Otherwise there is one node.

    Args:
      environ: environment variables; default: `os.environ`.

    Raises:
      ConfigError: there are several nodes and no coordinator is given.
    """
    environ = os.environ if environ is None else environ
    slurm = _number(environ, "SLURM_STEP_NUM_NODES", 1)
    if slurm > 1:
        if environ.get("SLURM_LOCALID", "0") != "0":
            raise ConfigError("start one launcher per node: srun --ntasks-per-node=1 python -m jaxstack.launch ...")
        coordinator = environ.get(COORDINATOR) or slurm_coordinator(environ)
        return Nodes(slurm, _number(environ, "SLURM_NODEID"), coordinator)
    given = _number(environ, NODES, 1)
    if given > 1:
        if COORDINATOR not in environ:
            raise ConfigError(f"{NODES} is {given}, but {COORDINATOR} (HOST:PORT) is not set.")
        rank = NODE_RANK if NODE_RANK in environ else "JOB_COMPLETION_INDEX"
        return Nodes(given, _number(environ, rank), environ[COORDINATOR])
    return Nodes()


def slurm_coordinator(environ: Mapping[str, str]) -> str:
    """Return an address for the coordinator: the first host of a Slurm step, with a port derived from the job's id.

    Raises:
      ConfigError: the list of nodes cannot be read.
    """
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", hosts)
    if not match:
        raise ConfigError(f"the first host cannot be read from Slurm's node list {hosts!r}; set {COORDINATOR}.")
    return f"{match[1]}{match[2] or ''}:{61440 + _number(environ, 'SLURM_JOB_ID', 0) % 4096}"


def split_address(address: str) -> tuple[str, int]:
    """Split an address `HOST:PORT` or `[IPV6]:PORT` into host and port.

    Raises:
      ConfigError: the address has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"the coordinator's address must be HOST:PORT, e.g. 10.0.0.1:8476, not {address!r}.")
    return host.strip("[]"), int(port)


def local_address(coordinator: str) -> str:
    """Return this host's address on the network on which it reaches the coordinator `HOST:PORT`.

    Raises:
      OSError: there is no way to the coordinator.
    """
    host, port = split_address(coordinator)
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # of a datagram socket: only chooses the route, nothing is sent
        return probe.getsockname()[0]


def is_loopback(address: str) -> bool:
    """Return True if the host of an address `HOST:PORT` resolves to the loopback interface only."""
    host, port = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(one).split("%")[0]).is_loopback for one in found)


def check_tls_files(coordinator: str, environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the certificate, key and CA files of mutual TLS between the processes, or None if TLS is not used.

    Args:
      coordinator: HOST:PORT of the coordinator.
      environ: environment variables; default: `os.environ`.

    Raises:
      ConfigError: a file is missing; or the coordinator is not on the loopback interface, and there are neither files
        nor the permission to do without TLS.
    """
    environ = os.environ if environ is None else environ
    files = tuple(environ.get(name, "") for name in TLS_FILES)
    if any(files):
        absent = [name for name, file in zip(TLS_FILES, files, strict=True) if not os.path.isfile(file)]
        if absent:
            raise ConfigError(f"mutual TLS needs three files; not a file: {', '.join(absent)}.")
        return files
    if is_loopback(coordinator) or environ.get(INSECURE) == "1":
        return None
    raise ConfigError(
        f"the coordinator {coordinator} can be reached by other machines, and whoever reaches it can take part in the "
        f"run. Give certificates for mutual TLS (--tls CERT KEY CA; scripts/make_tls.sh makes them), or --insecure on "
        "a network that nobody else is on."
    )


def add_tls_arguments(parser: argparse._ActionsContainer) -> None:
    """Add command-line options for mutual TLS between processes to a parser or a group of options."""
    parser.add_argument(
        "--tls", nargs=3, metavar=("CERT", "KEY", "CA"), help="files for mutual TLS; needed off the loopback interface"
    )
    parser.add_argument(
        "--tls-peer-prefix", metavar="URI", help="accept peers whose certificate names a URI with this prefix"
    )
    parser.add_argument("--insecure", action="store_true", help="do without TLS on a network that nobody else is on")


def tls_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that pass the command line's TLS options to the processes."""
    found = dict(zip(TLS_FILES, args.tls or (), strict=False))
    found |= {TLS_PEER_PREFIX: args.tls_peer_prefix} if args.tls_peer_prefix else {}
    return found | ({INSECURE: "1"} if args.insecure else {})


def count_gpus(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of NVIDIA GPUs that the processes of this node will see; 0 without a driver, or on CPUs.

    Args:
      environ: environment variables; default: `os.environ`.
    """
    environ = os.environ if environ is None else environ
    if environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:  # an empty list hides all GPUs; a name of no GPU, such as -1 or NoDevFiles, those after it
        names = (name.strip() for name in chosen.split(","))
        return len(list(itertools.takewhile(_GPU_NAME.fullmatch, names)))
    folder = Path("/proc/driver/nvidia/gpus")
    if folder.is_dir():
        return len(list(folder.iterdir()))
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))  # in a container


def split_devices(devices: int, parts: int, part: int) -> tuple[int, ...]:
    """Return the indices of a host's GPUs that process `part` uses, if `parts` processes share them evenly.

    Raises:
      ConfigError: the devices cannot be split evenly.
    """
    if devices % parts:
        raise ConfigError(
            f"{devices} GPUs cannot be split evenly between {parts} processes per node; choose the GPUs with "
            "CUDA_VISIBLE_DEVICES, or set JAX_PLATFORMS=cpu for a run on CPUs."
        )
    each = devices // parts
    return tuple(range(part * each, (part + 1) * each))


def _slurm_devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the indices of this Slurm task's GPUs, if each task of its node sees all GPUs; None: all visible ones."""
    if chosen := _device_list(environ.get(LOCAL_DEVICES)):
        return chosen
    tasks = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    parts = int(tasks[0]) if tasks else 1
    gpus = count_gpus(environ)
    own = re.search(r"\d+$", environ.get("SLURM_GPUS_PER_TASK", ""))  # such as 2 or a100:2; each task then sees its own
    if parts == 1 or gpus < parts or (own is not None and gpus <= int(own[0])):
        return None
    return split_devices(gpus, parts, _number(environ, "SLURM_LOCALID", 0))


def _device_list(text: str | None) -> tuple[int, ...] | None:
    return tuple(int(one) for one in text.split(",")) if text else None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise ConfigError(f"{name} must be a number, not {text!r}.")
    return int(text)
