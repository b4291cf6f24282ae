"""Which process this is, where they meet, and whether that may be reached by others."""

import pytest

from jaxstack.distributed.cluster import (
    Nodes,
    check_tls_files,
    count_gpus,
    find_nodes,
    find_place,
    is_loopback,
    slurm_coordinator,
    split_devices,
)
from jaxstack.errors import ConfigError

SRUN = {
    "SLURM_JOB_ID": "5000", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "gpu[007-008]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1",
}  # fmt: skip


def test_alone_where_nothing_says_otherwise():
    assert find_place({}) is None and find_nodes({}) == Nodes()
    assert find_place({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) is None, "inside a job, but not started by srun"


def test_variables_of_the_launcher_come_first():
    given = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:99", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "1"}
    place = find_place({**SRUN, **given, "JAX_LOCAL_DEVICE_IDS": "2,3"})
    assert place is not None and (place.coordinator, place.count, place.index) == ("127.0.0.1:99", 3, 1)
    assert place.local_devices == (2, 3)


def test_slurm_tasks_and_nodes():
    place = find_place(SRUN)
    assert place is not None and (place.coordinator, place.count, place.index) == ("gpu007:62344", 4, 2)
    assert place.local_devices is None
    shared = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_LOCALID": "1"}
    place = find_place(shared)
    assert place is not None and place.local_devices == (2, 3)
    assert find_nodes(SRUN) == Nodes(2, 1, "gpu007:62344")
    with pytest.raises(ConfigError, match="one launcher per node"):
        find_nodes({**SRUN, "SLURM_LOCALID": "1"})


@pytest.mark.parametrize(
    ("nodes", "first"), [("a1", "a1"), ("a1,b2", "a1"), ("a[1-3,7],b", "a1"), ("rack-2-[011,013]", "rack-2-011")]
)
def test_first_host_of_a_node_list(nodes, first):
    assert slurm_coordinator({"SLURM_STEP_NODELIST": nodes}) == f"{first}:61440"


def test_an_indexed_kubernetes_job():
    pod = {"JAXSTACK_NODES": "4", "JOB_COMPLETION_INDEX": "3", "JAX_COORDINATOR_ADDRESS": "train-0.svc:8476"}
    assert find_nodes(pod) == Nodes(4, 3, "train-0.svc:8476")
    with pytest.raises(ConfigError, match="JAX_COORDINATOR_ADDRESS"):
        find_nodes({"JAXSTACK_NODES": "4", "JOB_COMPLETION_INDEX": "3"})


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID"),
        ({"JAX_COORDINATOR_ADDRESS": "h", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, r"0\.\.1"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "number"),
    ],
)
def test_contradictions_are_told(variables, said):
    with pytest.raises(ConfigError, match=said):
        find_place(variables)


def test_off_the_loopback_interface_there_is_tls_or_a_word(tmp_path):
    assert is_loopback("127.0.0.1:1") and is_loopback("[::1]:1") and is_loopback("localhost:1")
    assert not is_loopback("10.0.0.1:1") and not is_loopback("0.0.0.0:1") and not is_loopback("no-such-host.invalid:1")
    assert check_tls_files("127.0.0.1:1", {}) is None
    with pytest.raises(ConfigError, match="--insecure"):
        check_tls_files("10.0.0.1:1", {})
    assert check_tls_files("10.0.0.1:1", {"JAXSTACK_INSECURE": "1"}) is None
    files = {name: str(tmp_path / name) for name in ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")}
    with pytest.raises(ConfigError, match="JAX_MTLS_KEY_FILE"):
        check_tls_files("127.0.0.1:1", files)
    for path in files.values():
        open(path, "w").close()
    assert check_tls_files("10.0.0.1:1", files) == tuple(files.values())


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_PER_TASK": "h200:2"}, (2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_PER_TASK": "1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None),
    ],
)
def test_slurm_tasks_divide_the_gpus_that_they_all_see(variables, devices):
    """Those of `--gpus-per-task` are each task's own."""
    place = find_place({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1", **variables})
    assert place is not None and place.local_devices == devices


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2, 3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-GPU-1/2/0,MIG-5c2a"}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}, 0),
    ],
)
def test_the_gpus_that_processes_see_are_counted_as_cuda_does(variables, count):
    assert count_gpus(variables) == count


def test_gpus_are_split_evenly():
    assert [split_devices(8, 4, part) for part in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    with pytest.raises(ConfigError, match="8 GPUs cannot be split evenly between 3.*JAX_PLATFORMS=cpu"):
        split_devices(8, 3, 0)
