"""Collectives: closed forms at large sizes, latency at small ones, and the network between hosts."""

import numpy as np
import pytest

from jaxstack.cost_model.cluster import CollectiveModel, Group, combined_group, group_of, parse_cluster

CLUSTER = parse_cluster("4 x 8 h200")
MODEL = CollectiveModel(CLUSTER, 1.0, 1.0)
LARGE = 2.0**34


def group(size, per_host):
    return Group(np.array(float(size)), np.array(float(per_host)))


def test_large_arrays_take_bytes_over_bandwidth():
    link = CLUSTER.link_bandwidth
    eight = group(8, 8)
    assert MODEL.all_gather(LARGE, eight) == pytest.approx(LARGE * 7 / 8 / link, rel=1e-2)
    assert MODEL.reduce_scatter(LARGE, eight) == MODEL.all_gather(LARGE, eight)
    assert MODEL.all_reduce(LARGE, eight) == pytest.approx(2 * LARGE * 7 / 8 / link, rel=1e-2)
    assert MODEL.all_to_all(LARGE, eight) == pytest.approx(LARGE * 7 / 8 / link, rel=1e-2)
    assert MODEL.send(LARGE, eight) == pytest.approx(LARGE / link, rel=1e-2)


def test_measured_bandwidth_of_four_h200s():
    """NCCL through jax, 512 MiB per GPU: all-reduce 296, all-gather 322, reduce-scatter 289 GB/s of bus bandwidth."""
    model = CollectiveModel(parse_cluster("1 x 4 h200"), 0.68, 0.85)
    size = 2.0**29
    four = group(4, 4)
    for seconds, measured in ((model.all_reduce(size, four) / 2, 296e9), (model.all_gather(size, four), 322e9)):
        assert size * 3 / 4 / seconds == pytest.approx(measured, rel=0.1)


def test_one_device_sends_nothing():
    one = group(1, 1)
    for collective in (MODEL.all_gather, MODEL.all_reduce, MODEL.all_to_all, MODEL.send):
        assert collective(LARGE, one) == 0


def test_rings_use_the_adapters_of_all_their_gpus():
    network = CLUSTER.network_bandwidth
    assert MODEL.bandwidth(group(4, 1)) == network
    assert MODEL.bandwidth(group(32, 8)) == 8 * network
    assert MODEL.all_gather(LARGE, group(4, 1)) > 6 * MODEL.all_gather(LARGE, group(32, 8))


def test_trees_and_the_low_latency_protocol_win_where_arrays_are_small():
    many = group(4096, 8)
    ring_hops = 2 * 4095 * 0.18 * CLUSTER.link_latency
    assert MODEL.all_reduce(1e3, many) < ring_hops
    assert MODEL.all_gather(1e3, group(8, 8)) < 8.4e-6 + 7 * CLUSTER.link_latency


def test_groups_by_degree_and_stride():
    assert group_of(8, 1, 8).per_host == 8
    assert group_of(8, 2, 8).per_host == 4
    assert group_of(4, 8, 8).per_host == 1
    assert group_of(6, 1, 8).per_host == 2  # gcd: three hosts with two members each
    both = combined_group(group_of(2, 1, 8), group_of(8, 2, 8))
    assert (both.size, both.per_host, both.hosts) == (16, 8, 2)
