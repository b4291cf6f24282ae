"""Which devices kernels reach each other's memory on."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.collective_matmul.api import reason_against_kernels
from pallas_kernels.collective_matmul.request import CollectiveRequest
from pallas_kernels.hopper.peers import unmeasured_peers, unsupported_peers
from pallas_kernels.target import Target

HOPPER = Target("cuda", (9, 0), declared=True)


@pytest.mark.parametrize(
    ("devices", "kind", "reason"),
    [
        (8, "NVIDIA H100 80GB HBM3", None),
        (1, "NVIDIA H100 PCIe", None),
        (2, "NVIDIA H100 PCIe", "which joins no NVIDIA H100 PCIe"),
        (16, "NVIDIA H200", "at most 8 devices, the axis has 16"),
    ],
)
def test_up_to_eight_devices_joined_by_nvlink(devices, kind, reason):
    found = unsupported_peers(HOPPER, devices, kind)
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
def test_processes_of_one_host_use_the_kernels_if_they_are_asked_for(monkeypatch):
    here = Target("cuda", (9, 0))
    request = CollectiveRequest(4096, 2048, (4096,), 2, "tensor", jnp.dtype("bfloat16"), here)
    assert unmeasured_peers(here) is None
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(slice_index=0, process_index=i) for i in range(2)])
    assert unsupported_peers(here, 2, "NVIDIA H200") is None
    assert "not timed yet between processes, these are 2" in (reason_against_kernels(request) or "")
    assert reason_against_kernels(request, support_only=True) is None
    assert unmeasured_peers(HOPPER) is None


def test_processes_of_several_hosts_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(
        jax, "devices", lambda: [SimpleNamespace(slice_index=i // 2, process_index=i) for i in range(4)]
    )
    assert "the 4 processes are on 2" in (unsupported_peers(Target("cuda", (9, 0)), 2, "NVIDIA H200") or "")
