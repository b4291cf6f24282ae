"""The scripts for clusters, with stand-ins for Slurm; the page of reliability figures."""

import json
import os
import re
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from jaxstack.launch.__main__ import make_job, make_parser
from jaxstack.train import make_parser as make_train_parser
from scripts.pages import reliability

ROOT = Path(__file__).resolve().parents[1]


TRAINING = ("configs/quickstart.yaml", "train.steps=5")


def run_sbatch(
    folder: Path, code: int, restarts: int = 0, arguments: Sequence[str] = TRAINING, **more: str
) -> tuple[int, list[str], str]:
    """The batch script, with an `srun` that ends with `code`: its own code, srun's words, and what was queued again."""
    tools = folder / "bin"
    log = folder / "log"
    tools.mkdir()
    for name, text in {
        "srun": f'printf "%s\\n" "$@" > {log}; ls -l "$HOME/.cache/jaxstack" >> {log}.tls; exit {code}',
        "scontrol": f'echo "$@" >> {log}.queued',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    variables = {
        "PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(folder), "SLURM_JOB_ID": "77",
        "SLURM_RESTART_COUNT": str(restarts), "SLURM_JOB_NUM_NODES": "4", **more,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "scripts/slurm.sbatch", *arguments],
        cwd=ROOT,
        env=variables,
        timeout=60,
    )
    queued = Path(f"{log}.queued")
    assert not (folder / ".cache" / "jaxstack" / "tls-77").exists(), "the job's key is gone with the job"
    return done.returncode, log.read_text().splitlines(), queued.read_text() if queued.exists() else ""


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(0, 0, False), (2, 0, False), (130, 0, False), (143, 3, True), (1, 0, True), (1, 50, False)],
)
def test_slurm_queues_again_what_can_go_on(tmp_path, code, restarts, again):
    found, words, queued = run_sbatch(tmp_path, code, restarts)
    assert found == code and (queued == "requeue 77\n") == again
    launch = words[words.index("jaxstack.launch") + 1 :]
    args = make_parser().parse_args(launch)
    assert {"--kill-on-bad-exit=1", "--wait=0"} <= set(words) and args.nodes is None
    assert args.tls and args.tls_peer_prefix == "spiffe://jaxstack/job-77/"
    assert args.command[:3] == ["python", "-m", "jaxstack.train"]
    train = make_train_parser().parse_intermixed_args(args.command[3:])
    assert (train.config, train.overrides) == ("configs/quickstart.yaml", ["train.steps=5"])


def test_slurm_starts_other_commands(tmp_path):
    """One node may be done long before another: srun must not end the others then."""
    _, words, _ = run_sbatch(tmp_path, 0, arguments=["tune", "--config", "c.yaml", "--study", "s.yaml"])
    assert words[words.index("--") + 1 :] == [
        "python",
        "-m",
        "jaxstack.tune",
        "--config",
        "c.yaml",
        "--study",
        "s.yaml",
    ]
    assert "--wait=0" in words


def test_slurm_leaves_the_other_nodes_alone_where_their_number_may_change(tmp_path, monkeypatch):
    found, words, _ = run_sbatch(tmp_path, 0, JAXSTACK_MIN_NODES="2")
    assert found == 0 and {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(words)
    args = make_parser().parse_args(words[words.index("jaxstack.launch") + 1 :])
    assert args.nodes == (2, 4) and args.rendezvous == str(tmp_path / ".cache" / "jaxstack" / "meet-77")
    args.tls = None
    for name, value in {"STEP_NUM_NODES": "4", "NODEID": "3", "STEP_NODELIST": "n[0-3]", "JOB_ID": "77"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("JAXSTACK_INSECURE", "1")
    job = make_job(args)
    assert (job.nodes.count, job.nodes.rank, job.fewest_nodes) == (4, 3, 2)
    assert job.nodes.coordinator == f"{socket.gethostname()}:{61440 + 77}"


def test_jobset_with_changing_nodes_starts_launchers_that_meet(tmp_path, monkeypatch):
    """A pod that is lost is made anew alone: its index does not count for the others."""
    job_set = yaml.safe_load((ROOT / "scripts" / "jobset_changing_nodes.yaml").read_text())
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["backoffLimitPerIndex"] > 0 and "backoffLimit" not in job
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    container = job["template"]["spec"]["containers"][0]
    given = {"NODE_RANK": "1", "POD_IP": "10.0.0.7"}
    assert {one["name"] for one in container["env"]} == set(given)
    words = [*container["command"], *container["args"]]
    for name, value in given.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert words[:3] == ["python", "-m", "jaxstack.launch"] and not any("$" in word for word in words)
    args = make_parser().parse_args(words[3:])
    args.tls = None
    monkeypatch.setenv("JAXSTACK_INSECURE", "1")
    found = make_job(args)
    assert (found.nodes.count, found.nodes.rank, found.nodes.coordinator) == (job["completions"], 1, "10.0.0.7:8476")
    assert found.fewest_nodes == 1 and str(found.rendezvous).startswith("/shared/")
    fixed = yaml.safe_load((ROOT / "scripts" / "jobset.yaml").read_text())
    kept = fixed["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert job["template"]["spec"]["volumes"] == kept["volumes"]
    assert container["volumeMounts"] == kept["containers"][0]["volumeMounts"]


def test_jobset_starts_a_launcher_that_finds_its_place(tmp_path, monkeypatch):
    job_set = yaml.safe_load((ROOT / "scripts" / "jobset.yaml").read_text())
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert job["parallelism"] == job["completions"] == int(variables["JAXSTACK_NODES"])
    (rule,) = job_set["spec"]["failurePolicy"]["rules"]
    # What JobSet's webhook wants of a rule's name; its schema does not say it.
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]) and len(rule["name"]) <= 128
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert job["completionMode"] == "Indexed" and job["template"]["spec"]["restartPolicy"] == "Never"
    words = [*container["command"], *container["args"]]
    assert words[:3] == ["python", "-m", "jaxstack.launch"]
    monkeypatch.setenv("JAXSTACK_NODES", variables["JAXSTACK_NODES"])
    monkeypatch.setenv(
        "JAX_COORDINATOR_ADDRESS", variables["JAX_COORDINATOR_ADDRESS"].replace("$(COORDINATOR_HOST)", "h")
    )
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    args = make_parser().parse_args(words[3:])
    for name, path in zip(("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE"), args.tls, strict=True):
        assert path.startswith("/tls/")
        monkeypatch.setenv(name, str(tmp_path))
    args.tls = [str(tmp_path / name) for name in ("cert", "key", "ca")]
    for path in args.tls:
        Path(path).touch()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    found = make_job(args)
    assert (found.nodes.count, found.nodes.rank, found.nodes.coordinator) == (2, 1, "h:8476")
    assert found.command[:3] == ("python", "-m", "jaxstack.train")


def test_local_script_starts_the_launcher(tmp_path):
    (tmp_path / "python").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "scripts/local.sh", "2", "c.yaml", "train.steps=3"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout == "-m jaxstack.launch --processes 2 -- python -m jaxstack.train --config c.yaml train.steps=3\n"


def test_reliability_table_shows_the_newest_records(tmp_path):
    row = {
        "row": 2,
        "test": "t",
        "figure": "the former",
        "device": "cpu",
        "versions": {"jax": "0"},
        "date": "2026-01-01T00:00",
    }
    shortened = {**row, "name": "n", "test": "2 x t", "figure": "the shortened", "date": "2026-01-03T00:00"}
    at_length = {**row, "name": "n", "test": "9 x t", "figure": "the whole", "full": True}
    lines = [{**row, "figure": "new", "date": "2026-01-02T00:00"}, row, at_length, shortened]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = reliability.results_table(reliability.newest_rows(tmp_path / "results.jsonl"))
    assert "| 2 | t | new | cpu | 0 | 2026-01-02 |" in made and "the former" not in made
    assert "| 2 | 9 x t | the whole |" in made and "the shortened" not in made
