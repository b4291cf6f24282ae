"""The engines of one host behind a router: child processes, each started again when it ends."""

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from jaxstack.distributed.cluster import COORDINATOR, COUNT, INDEX, count_gpus, find_nodes, split_address, split_devices
from jaxstack.distributed.parent_death import die_with_parent
from jaxstack.errors import ConfigError
from jaxstack.heartbeat import doing
from jaxstack.resilience.exit_on_signal import stop_signals
from jaxstack.serve.config import ServerConfig
from jaxstack.serve.listen import Running, bind, is_loopback, own_address, run_server
from jaxstack.serve.registration import ENGINE_KEY
from jaxstack.serve.router import Router
from jaxstack.serve.tasks import run_all
from jaxstack.serve.upstream import Address
from jaxstack.stored.run_directory import TrainingRun

_LONGEST_PAUSE_SECONDS = 30.0
_HEALTHY_SECONDS = 60.0
"""An engine that has lived so long is started again at once."""
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address of all interfaces -> the one at which this host's own processes connect."""
_JOB = ("SLURM_", "JAXSTACK_NODE", COORDINATOR, COUNT, INDEX)
"""Beginnings of variables by which a process finds the others of its job; engines do not know one another."""


class Replicas:
    """Starts engines as child processes, and starts each again when it ends, until it is told to stop.

    Args:
      count: number of engines, which share the GPUs of this host evenly.
      arguments: command line of `python -m jaxstack.serve` for each.
      drain: seconds that an engine has to end after SIGTERM.
      engine_key: key with which the engines register.
      report: prints a message.
    """

    def __init__(
        self, count: int, arguments: Sequence[str], drain: float, engine_key: str, report: Callable[[str], None]
    ):
        self._command = [sys.executable, "-m", "jaxstack.serve", *arguments]
        self._environments = [{**_environment(number, count), ENGINE_KEY: engine_key} for number in range(count)]
        self._drain = drain
        self._report = report
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def run(self) -> None:
        """Keep the engines running until this call is cancelled; then end them.

        Raises:
          JaxstackError: an engine finds its configuration wrong, which another start does not change. Of an engine that
            has worked before it is a matter of its surroundings, such as a deleted checkpoint, and it is started again.
        """
        try:
            await run_all(*(partial(self._keep_running, *each) for each in enumerate(self._environments)))
        finally:
            await self._end()

    async def _keep_running(self, number: int, environment: Mapping[str, str]) -> None:
        pause = 0.0
        has_worked = False
        while True:
            began = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C comes to the router alone
                preexec_fn=die_with_parent,
            )
            self._processes[number] = process
            code = await process.wait()
            healthy = time.monotonic() - began > _HEALTHY_SECONDS
            has_worked = has_worked or healthy
            if code == 2 and not has_worked:
                raise ConfigError(f"engine {number} ended with exit code 2; its message is above.")
            pause = 0.0 if healthy else min(max(1.0, 2 * pause), _LONGEST_PAUSE_SECONDS)
            self._report(f"engine {number} ended with {code}; starting it again in {pause:g} s")
            await asyncio.sleep(pause)

    async def _end(self) -> None:
        """Send SIGTERM to all engines, and SIGKILL to those that have not ended after their time."""
        living = [process for process in self._processes.values() if process.returncode is None]
        for process in living:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain):
                await asyncio.gather(*(process.wait() for process in living))
        for process in living:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _environment(number: int, count: int) -> dict[str, str]:
    """Return the environment of an engine: this process's, with its share of the GPUs."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(_JOB)}
    gpus = count_gpus()
    if gpus and count > 1:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = seen.split(",") if seen else [str(index) for index in range(gpus)]
        found["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in split_devices(gpus, count, number))
    return found


def serve_replicas(
    args: argparse.Namespace,
    config: ServerConfig,
    api_key: str | None,
    engine_key: str | None,
    report: Callable[[str], None],
) -> int | None:
    """Serve with several engines until SIGTERM or Ctrl-C: the router and engines here, on further nodes only engines.

    Args:
      args: the command line of `python -m jaxstack.serve`.
      config: limits.
      api_key: key that clients send.
      engine_key: key with which engines register; None: a random one, for the engines of one node.
      report: prints a message.

    Returns:
      Exit code of a node without the router.

    Raises:
      ConfigError: the command line or the environment do not allow it.
    """
    if args.replicas < 1 or args.router is not None:
        raise ConfigError("--replicas must be at least 1, and without --router, which is for a single engine.")
    nodes = find_nodes()
    if nodes.count > 1 and engine_key is None:
        raise ConfigError(
            f"engines on several nodes need the environment variable {ENGINE_KEY}, a secret with which they register."
        )
    key = engine_key or secrets.token_urlsafe(32)
    if nodes.rank > 0 and nodes.coordinator is not None:
        return _serve_further_node(args, config, nodes.coordinator, key, report)
    bound = bind(args.host, args.port)
    with contextlib.closing(bound):
        if nodes.count > 1 and is_loopback(bound):
            raise ConfigError("several nodes need a --host that the others can reach, such as 0.0.0.0.")
        here = Address(*bound.getsockname()[:2])
        if here.host in _EVERYWHERE:
            here = here._replace(host=_EVERYWHERE[here.host])
        engines = Replicas(
            args.replicas, engine_arguments(args, here, here.host, report), config.drain + 10, key, report
        )
        router = Router(config, loopback=is_loopback(bound), api_key=api_key, engine_key=key, report=report)
        greeting = f"router of {args.replicas} engine(s) on {nodes.count} node(s) at {{}} (Ctrl-C ends)"
        with doing(None):
            beside = partial(run_all, engines.run, router.watch)
            run_server(router, bound, Running(lambda: router.unanswered, greeting, beside), report)
    return None


def _serve_further_node(
    args: argparse.Namespace, config: ServerConfig, coordinator: str, key: str, report: Callable[[str], None]
) -> int:
    """Keep engines of the first node's router running on another node."""
    if args.port == 0:
        raise ConfigError("several nodes need a --port that is not 0, at which all find the router.")
    first = Address(split_address(coordinator)[0], args.port)
    arguments = engine_arguments(args, first, own_address(first), report)
    engines = Replicas(args.replicas, arguments, config.drain + 10, key, report)
    report(f"a further node: {args.replicas} engine(s) of the router at {first}")
    with doing(None):
        return asyncio.run(_until_signal(engines))


async def _until_signal(engines: Replicas) -> int:
    """Keep the engines running until a signal comes, and end them; return the exit code 0."""
    task = asyncio.ensure_future(engines.run())
    for signum in stop_signals():
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return 0


def engine_arguments(args: argparse.Namespace, router: Address, host: str, report: Callable[[str], None]) -> list[str]:
    """Return the command line of an engine, the same for all and for each start: with one checkpoint of a run."""
    step = args.step
    if step is None and TrainingRun.is_in(Path(args.run)):
        step = TrainingRun(Path(args.run), report=report).choose_step(None)
    found = ["--run", args.run, "--router", f"http://{router}", "--host", host, "--port", "0"]
    for option, values in (
        ("draft", [args.draft]),
        ("name", [args.name]),
        ("step", [step]),
        ("recipe", [args.recipe]),
        ("adapter", args.adapter),
    ):
        for value in values:
            found += [] if value is None else [f"--{option}", str(value)]
    return [*found, *args.overrides]
