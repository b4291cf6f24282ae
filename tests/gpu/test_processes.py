"""One process for each of two GPUs, started by the launcher, which reach each other's memory."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxstack.distributed.xla_options import nccl_version
from tests.gpu.conftest import on_hopper

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 6
SHAPE = (
    "model.num_layers=2", "train.sequence_length=2048", "train.global_batch_size=8", f"train.steps={STEPS}",
    "schedule.warmup_steps=0", "train.eval_every_steps=null", "checkpoint.every_steps=1000000", "observe.log_every=1",
    "observe.trackers=[jsonl]", "observe.fail_on_fallback=false", "resilience.verify_layout=false",
    "data.sources=[{path: synthetic}]",
)  # fmt: skip


needs_symmetric_memory = pytest.mark.skipif(
    nccl_version() < (2, 29), reason="needs NCCL 2.29, which maps arrays into all processes of a host"
)


def run(folder: Path, name: str, *overrides: str) -> tuple[list[float], dict]:
    """The losses of a run of two processes, and what it says that ran; one that hangs prints its stacks and fails."""
    command = [
        sys.executable, "-m", "jaxstack.launch", "--processes", "2", "--max-restarts", "0", "--start-seconds", "200",
        "--step-seconds", "60", "--save-seconds", "120", "--",
        sys.executable, "-m", "jaxstack.train", "--config", "configs/llama3-1b.yaml", f"run.dir={folder}",
        f"run.name={name}", *SHAPE, *overrides,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-12_000:]
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    environment = json.loads((folder / name / "environment.json").read_text())
    return [line["loss"] for line in lines if "loss" in line], environment["ran"]


@pytest.mark.usefixtures("two_gpus")
@needs_symmetric_memory
@pytest.mark.skipif(not on_hopper(), reason="our Mosaic kernels need an H100 or H200")
def test_overlapped_matmuls_between_processes(tmp_path):
    layout = ("parallel={data: 1, tensor: 2, sequence: true}",)
    wanted, _ = run(tmp_path, "plain", *layout, "parallel.overlap=never")
    found, ran = run(tmp_path, "kernels", *layout, "parallel.overlap=always")
    inner = {k["backend"] for k in ran["kernels"] if k["operation"] in ("all_gather_matmul", "matmul_reduce_scatter")}
    assert inner == {"mosaic"}, ran["kernels"]
    assert len(found) == STEPS
    np.testing.assert_allclose(found, wanted, rtol=0.005)


@needs_symmetric_memory
@pytest.mark.usefixtures("two_gpus")
def test_copy_engines_between_processes(tmp_path):
    """The processes find out that they share a host, and XLA compiles permutes to NCCL's one-sided transfers."""
    layout = ("parallel={data: 1, fsdp: 2}",)
    wanted, _ = run(tmp_path, "plain", *layout, "parallel.copy_engines=never")
    found, ran = run(tmp_path, "copies", *layout, "parallel.copy_engines=always")
    mode = ran["compiler_options"]["xla_gpu_collective_permute_mode"]
    assert mode == "COLLECTIVES_SYMMETRIC_MEMORY", "is share_host true?"
    assert len(found) == STEPS
    np.testing.assert_allclose(found, wanted, rtol=0.005)
