"""Which devices kernels reach each other's memory on."""

import pytest

from pallas_kernels.hopper.peers import unsupported_peers
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
