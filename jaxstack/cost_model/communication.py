"""Predicts the time of collectives with NCCL's own cost model: latency plus bytes over bandwidth.

NCCL (src/graph/tuning.cc) models each algorithm and protocol as `base + hops * latency + bytes / bandwidth` and takes
the fastest. This module does the same for rings and trees, with the protocols LL (low latency, half the bandwidth) and
Simple. All functions take NumPy arrays of any equal shapes, so thousands of layouts are evaluated at once.
"""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxstack.cost_model.cluster import Cluster

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
