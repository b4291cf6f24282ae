"""Clusters as text and as files, and the messages about wrong ones."""

import pytest

from jaxstack.cost_model.cluster import cluster_names, cluster_of_devices, parse_cluster, resized
from jaxstack.errors import ConfigError
from jaxstack.observe.throughput import dense_bf16_peak
from jaxstack.plan.rehearsal import device_memory


@pytest.mark.parametrize(
    "text, hosts, gpus",
    [
        ("8 x 8 h200", 8, 8),
        ("8x8 H200", 8, 8),
        ("4 h200", 1, 4),
        ("2 x h200", 1, 2),
        ("h200", 1, 8),
        ("1 x 1 a100", 1, 1),
    ],
)
def test_numbers_in_the_text(text, hosts, gpus):
    cluster = parse_cluster(text)
    assert (cluster.hosts, cluster.gpus_per_host, cluster.devices) == (hosts, gpus, hosts * gpus)


def test_shipped_files_agree_with_the_rest_of_the_project():
    assert cluster_names() == ["a100", "gb200", "h100", "h200", "l40s"]
    for name in cluster_names():
        cluster = parse_cluster(name)
        assert cluster.peak_tflops.bfloat16 == dense_bf16_peak(f"NVIDIA {cluster.name}")
    assert parse_cluster("h200").memory_bytes == device_memory("h200")


def test_a_file_of_ones_own(tmp_path):
    text = "\n".join(
        ["name: mine", "gpus_per_host: 4", "memory_bytes: 34359738368", "peak_tflops: {float32: 10, bfloat16: 100}"]
        + ["memory_bandwidth: 1e12", "link_bandwidth: 1e11", "link_latency: 1e-6", "network_bandwidth: 1e10"]
        + ["network_latency: 1e-5", "host_bandwidth: 2e10", "watts: 300"]
    )
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert parse_cluster(f"3 x 4 {file}").devices == 12
    assert parse_cluster(str(file)).price_per_gpu_hour is None
    file.write_text(text.replace("1e11", "1e9"))
    with pytest.raises(ConfigError, match="network_bandwidth .* must not exceed link_bandwidth"):
        parse_cluster(f"2 x 4 {file}")
    file.write_text(text.replace("watts: 300", "wats: -1"))
    with pytest.raises(ConfigError, match="wats"):
        parse_cluster(str(file))


@pytest.mark.parametrize("text", ["8 x 8 h20", "0 x 8 h200", "", "8 x 8", "nowhere.yaml"])
def test_wrong_texts_are_refused(text):
    with pytest.raises(ConfigError):
        parse_cluster(text)


def test_cluster_of_the_devices_that_are_present():
    assert cluster_of_devices("cpu", 8, one_host=True) is None
    found = cluster_of_devices("NVIDIA H200", 4, one_host=True)
    assert found is not None and found.title == "1 x 4 H200"
    assert resized(parse_cluster("h200"), 24).title == "3 x 8 H200"
