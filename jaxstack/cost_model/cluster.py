"""Clusters: kinds of GPUs, their rates, memory and links, the measured fractions of them, and times of collectives.

`benchmarks/planning/calibrate_planner.py` writes the fractions of the peak rates that training achieves to
`efficiency.json`, together with the rows of `benchmarks/results` that they come from.

The times of collectives are those of NCCL's own cost model (src/graph/tuning.cc): each algorithm and protocol takes
`base + hops * latency + bytes / bandwidth`, and the fastest is used; here rings and trees, with the protocols LL (low
latency, half the bandwidth) and Simple. These functions take NumPy arrays of any equal shapes, so that thousands of
layouts are evaluated at once.
"""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from jaxstack.config.base import Component
from jaxstack.config.loader import build_component, load_yaml
from jaxstack.errors import ConfigError, nearest

_DIRECTORY = Path(__file__).with_name("clusters")
MOST_DEVICES = 1 << 17
"""Maximum number of GPUs of a cluster. The number of layouts, and so the time of a search, grows with it."""
_FORM = re.compile(r"(?:(?P<hosts>\d+)\s*x\s*)?(?:(?P<gpus>\d+)\s*x?\s+)?(?P<kind>\S.*)")


class Peaks(Component):
    """Dense peak TFLOP/s of one GPU by the dtype of a matmul's operands."""

    float32: float = Field(gt=0)
    bfloat16: float = Field(gt=0)
    float8: float | None = Field(default=None, gt=0)
    """Left out: the GPU has no FP8 tensor cores."""


class Cluster(Component):
    """A cluster of equal hosts with equal GPUs. Bandwidths are bytes per second in one direction."""

    name: str
    """Name in tables."""
    device_kind: str | None = None
    """Regular expression that jax's `device_kind` of this GPU matches; left out: it is never chosen by itself."""
    hosts: int = Field(default=1, ge=1, le=100_000)
    """Number of hosts."""
    gpus_per_host: int = Field(ge=1, le=1024)
    """GPUs of a host, that is, GPUs between which the fast links are."""
    memory_bytes: int = Field(ge=2**30, le=2**43)
    """Memory of one GPU."""
    peak_tflops: Peaks
    """Dense peaks of one GPU."""
    memory_bandwidth: float = Field(ge=1e10, le=1e15)
    """Bandwidth of a GPU's memory."""
    link_bandwidth: float = Field(ge=1e8, le=1e14)
    """Bandwidth of one GPU to the others of its host."""
    link_latency: float = Field(gt=0, le=1e-2)
    """Seconds of one hop within a host."""
    network_bandwidth: float = Field(ge=1e8, le=1e14)
    """Bandwidth between hosts for each GPU."""
    network_latency: float = Field(gt=0, le=1e-2)
    """Seconds of one hop between hosts."""
    host_bandwidth: float = Field(ge=1e8, le=1e13)
    """Bandwidth of one GPU to the memory of its host."""
    watts: float = Field(gt=0, le=1e5)
    """Power of one GPU under load."""
    price_per_gpu_hour: float | None = Field(default=None, ge=0)
    """Price of one GPU for an hour, in any currency; left out: no cost is shown."""

    @model_validator(mode="after")
    def _check(self) -> "Cluster":
        if self.hosts > 1 and self.network_bandwidth > self.link_bandwidth:
            raise ValueError(
                f"network_bandwidth ({self.network_bandwidth:g} bytes/s for each GPU) must not exceed link_bandwidth "
                f"({self.link_bandwidth:g}); if all GPUs are equally near, give one host with more gpus_per_host."
            )
        if self.devices > MOST_DEVICES:
            raise ValueError(
                f"hosts ({self.hosts:,}) x gpus_per_host ({self.gpus_per_host:,}) are {self.devices:,} GPUs; "
                f"the search supports up to {MOST_DEVICES:,}."
            )
        return self

    @property
    def devices(self) -> int:
        """Total number of GPUs of the cluster."""
        return self.hosts * self.gpus_per_host

    @property
    def title(self) -> str:
        """Number and kind of the GPUs, such as `8 x 8 H200`."""
        return f"{self.hosts} x {self.gpus_per_host} {self.name}"


def cluster_names() -> list[str]:
    """Return the sorted names of the clusters that jaxstack has descriptions of."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def parse_cluster(text: str) -> Cluster:
    """Parse a text that describes a cluster, such as `8 x 8 h200` (hosts x GPUs per host).

    Args:
      text: `HOSTS x GPUS KIND`, `GPUS KIND` (one host) or `KIND` (one whole host). KIND is a shipped name, or the path
        of a YAML file with the fields of `Cluster`.

    Raises:
      ConfigError: the text or a value of the file is wrong.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--cluster {text!r} must be like '8 x 8 h200' (hosts x GPUs of each), '4 h200' or 'h200'.")
    kind = found["kind"].strip()
    is_file = kind.endswith((".yaml", ".yml")) or "/" in kind
    if not is_file and kind.lower() not in cluster_names():
        hint = nearest(kind.lower(), cluster_names())
        raise ConfigError(
            f"--cluster {text!r}: there is no cluster file {kind!r}; {hint}{'' if '?' in hint else '.'} "
            "The form is '8 x 8 h200' (hosts x GPUs of each), '4 h200' or 'h200'; the kind can be the path of a YAML "
            "file of your own, and those in jaxstack/cost_model/clusters show its fields."
        )
    if is_file and not Path(kind).expanduser().is_file():
        raise ConfigError(
            f"--cluster {text!r}: there is no file {kind}; give the path of a YAML file as those in "
            f"jaxstack/cost_model/clusters, or a shipped kind: {', '.join(cluster_names())}."
        )
    tree = load_yaml(kind if is_file else _DIRECTORY / f"{kind.lower()}.yaml")
    if found["gpus"] or found["hosts"]:
        hosts = found["hosts"]
        gpus = found["gpus"]
        # `8 x h200` has one number, which counts GPUs of one host.
        tree |= {"hosts": int(hosts or 1), "gpus_per_host": int(gpus)} if gpus else {"gpus_per_host": int(hosts)}
    return build_component(Cluster, tree, f"cluster {kind}")


def cluster_of_devices(device_kind: str, devices: int, *, one_host: bool) -> Cluster | None:
    """Return the shipped cluster description that matches JAX's `device_kind`, resized to `devices` devices.

    Args:
      device_kind: jax's name of the device.
      devices: number of devices in all hosts.
      one_host: True if they are in one host; otherwise hosts are as large as the file says, where that divides.

    Returns:
      The cluster, or None if no file describes this device.
    """
    files = (load_yaml(_DIRECTORY / f"{name}.yaml") for name in cluster_names())
    tree = next((t for t in files if re.search(rf"\b{t['device_kind']}\b", device_kind)), None)
    return None if tree is None else resized(build_component(Cluster, tree, device_kind), devices, one_host=one_host)


def resized(cluster: Cluster, devices: int, *, one_host: bool = False) -> Cluster:
    """Return the cluster with `devices` devices in all; the GPUs per host stay the same if they divide that number."""
    per_host = devices if one_host else math.gcd(devices, cluster.gpus_per_host)
    return cluster.model_copy(update={"hosts": devices // per_host, "gpus_per_host": per_host})


def part_of(cluster: Cluster, devices: int) -> Cluster:
    """Return the cluster cut down to `devices` devices: on one host if they fit, else on whole hosts if possible."""
    return resized(cluster, devices, one_host=devices <= cluster.gpus_per_host)


EFFICIENCY_FILE = Path(__file__).with_name("efficiency.json")


class Efficiency(Component):
    """Measured efficiencies of training: achieved rates as fractions of peak rates, and fixed overheads in seconds.

    All were measured on H200s; other GPUs use the same fractions.
    """

    matmul: float = Field(gt=0, le=1)
    """Matmuls of layers in bfloat16 within a training step, relative to the peak."""
    matmul_fp8: float = Field(gt=0, le=1)
    """Matmuls with FP8 operands and a scale per tensor within a training step, relative to the FP8 peak."""
    matmul_blockwise: float = Field(gt=0, le=1)
    """The same with a scale for every 128 values, as experts have."""
    head: float = Field(gt=0, le=1)
    """The matmuls of the output head and the loss, which are in bfloat16 always, relative to the peak."""
    attention_64: float = Field(gt=0, le=1)
    """Attention forward and backward at head_dim 64 and long sequences, relative to the bfloat16 peak."""
    attention_128: float = Field(gt=0, le=1)
    """The same at head_dim 128 and above."""
    attention_half_length: float = Field(ge=0)
    """Sequence length in tokens at which attention reaches half of its rate for long sequences."""
    elementwise: float = Field(gt=0, le=2)
    """Elementwise passes between the matmuls, relative to the memory bandwidth, by the planner's count of bytes."""
    copy_rate: float = Field(gt=0, le=1)
    """Reading and writing large arrays, as the optimizer does, relative to the memory bandwidth."""
    scan_passes: float = Field(ge=0)
    """Passes over the saved activations that a scan of layers adds, to stack and to slice them."""
    layer_seconds: float = Field(ge=0)
    """Seconds between kernels, for each layer and microbatch."""
    link: float = Field(gt=0, le=1)
    """Collectives of large arrays within a host, relative to the links' bandwidth."""
    network: float = Field(gt=0, le=1)
    """Collectives of large arrays between hosts, relative to the network's bandwidth."""
    transfers: float = Field(ge=0)
    """Time that transfers of weights and gradients during computation add to a step, relative to that of the transfers
    by themselves: below 1 if computation hides them, above 1 if they slow it down by more, as both share the
    multiprocessors and the memory."""
    transfers_scanned: float = Field(ge=0)
    """The same in a scan of layers, which gathers a layer as it begins."""
    tick_seconds: float = Field(ge=0)
    """Seconds that each tick of a pipeline adds: a conditional waits for the host."""


@functools.cache
def load_efficiency() -> Efficiency:
    """Load the measured efficiencies that the planner's forecasts use, from `efficiency.json`."""
    return build_component(Efficiency, json.loads(EFFICIENCY_FILE.read_text())["values"], str(EFFICIENCY_FILE))


Values = NDArray[np.float64]

_BASE = {"LL": 6.6e-6, "Simple": 8.4e-6}
"""Seconds to start a collective, by protocol (NCCL's table for rings)."""
_HOP = {"LL": 0.18, "Simple": 1.0}
"""Latency of a hop relative to the cluster's, which are those of the Simple protocol."""
_BANDWIDTH = {"LL": 0.5, "Simple": 1.0}
"""Bandwidth relative to that of the links: an LL message carries a flag for each four bytes of data."""
_TREE_BANDWIDTH = 0.92
"""Bandwidth of a double binary tree relative to a ring over the same links."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that take part in a collective: their number, and how many of them share a host.

    Attributes:
      size: number of devices.
      per_host: number of these in one host.
    """

    size: Values
    per_host: Values

    @property
    def hosts(self) -> Values:
        """Number of hosts that the group spans."""
        return self.size / self.per_host


def group_of(degree: ArrayLike, stride: ArrayLike, gpus_per_host: int) -> Group:
    """Return the group of devices along one mesh axis.

    Args:
      degree: degree of the axis.
      stride: product of the degrees of the faster axes, the distance between neighbours.
      gpus_per_host: GPUs of a host.
    """
    size = np.asarray(degree, float)
    stride = np.asarray(stride, float)
    within = np.maximum(np.floor(gpus_per_host / stride), 1.0)
    # An axis that does not fill whole hosts has as many members in a host as divide its degree.
    return Group(size, np.gcd(size.astype(int), within.astype(int)).astype(float))


def combined_group(first: Group, second: Group) -> Group:
    """Return the group of the devices along two mesh axes together."""
    return Group(first.size * second.size, first.per_host * second.per_host)


@dataclasses.dataclass(frozen=True)
class CollectiveModel:
    """Predicts the time of collectives on a cluster.

    Args:
      cluster: links and latencies.
      link_efficiency: achieved over nominal bandwidth within a host.
      network_efficiency: achieved over nominal bandwidth between hosts.
    """

    cluster: Cluster
    link_efficiency: float
    network_efficiency: float

    def bandwidth(self, group: Group) -> Values:
        """Return the bandwidth that each GPU gets in a ring through the group, in bytes per second.

        Every GPU has its own network adapter, so a ring that contains several GPUs of a host uses
        all of their adapters to reach the next host.
        """
        link = self.cluster.link_bandwidth * self.link_efficiency
        network = self.cluster.network_bandwidth * self.network_efficiency
        return np.where(group.hosts > 1, np.minimum(link, network * group.per_host), link)

    def all_gather(self, size: ArrayLike, group: Group) -> Values:
        """Return the seconds of an all-gather with a result of `size` bytes; each device gets (n - 1) / n of them."""
        return self._fastest(np.asarray(size, float) * (1 - 1 / group.size), group.size - 1, group)

    def reduce_scatter(self, size: ArrayLike, group: Group) -> Values:
        """Return the seconds of a reduce-scatter of `size` bytes per device; each device keeps 1 / n of the sum."""
        return self.all_gather(size, group)

    def all_reduce(self, size: ArrayLike, group: Group) -> Values:
        """Return the seconds of an all-reduce of `size` bytes, by the faster of a ring and a tree.

        The ring sends 2 (n - 1) / n of the bytes in 2 (n - 1) hops. The tree sends all of them twice, in
        2 log2(hosts) network hops plus those within a host.
        """
        size = np.asarray(size, float)
        ring = self._fastest(2 * size * (1 - 1 / group.size), 2 * (group.size - 1), group)
        hops = 2 * np.log2(np.maximum(group.hosts, 1)) * self.cluster.network_latency
        hops = hops + 2 * (group.per_host - 1) * self.cluster.link_latency
        tree = _BASE["Simple"] + hops + 2 * size / (self.bandwidth(group) * _TREE_BANDWIDTH)
        return np.where(group.size > 1, np.minimum(ring, tree), 0.0)

    def all_to_all(self, size: ArrayLike, group: Group) -> Values:
        """Return the seconds of an all-to-all in which each of n devices sends `size` / n bytes to every other one."""
        size = np.asarray(size, float) / group.size
        link = self.cluster.link_bandwidth * self.link_efficiency
        network = self.cluster.network_bandwidth * self.network_efficiency
        within = size * (group.per_host - 1) / link
        between = size * (group.size - group.per_host) / network
        latency = np.where(group.hosts > 1, self.cluster.network_latency, self.cluster.link_latency)
        return np.where(group.size > 1, _BASE["Simple"] + latency + np.maximum(within, between), 0.0)

    def send(self, size: ArrayLike, group: Group) -> Values:
        """Return the seconds to send `size` bytes to the next device of the group."""
        across = group.per_host < group.size
        link = self.cluster.link_bandwidth * self.link_efficiency
        network = self.cluster.network_bandwidth * self.network_efficiency
        latency = np.where(across, self.cluster.network_latency, self.cluster.link_latency)
        seconds = _BASE["Simple"] + latency + np.asarray(size, float) / np.where(across, network, link)
        return np.where(group.size > 1, seconds, 0.0)

    def _fastest(self, sent: Values, hops: Values, group: Group) -> Values:
        """Return the seconds of a ring that sends `sent` bytes per device, by NCCL's faster protocol (LL or Simple)."""
        across = hops * group.hosts / group.size
        latency = np.where(
            group.hosts > 1,
            across * self.cluster.network_latency + (hops - across) * self.cluster.link_latency,
            hops * self.cluster.link_latency,
        )
        seconds = [
            _BASE[name] + _HOP[name] * latency + sent / (self.bandwidth(group) * _BANDWIDTH[name]) for name in _BASE
        ]
        return np.where(group.size > 1, np.minimum(*seconds), 0.0)
