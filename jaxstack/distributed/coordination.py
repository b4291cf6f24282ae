"""Connects the processes of a run, and exchanges small values between them without using devices."""

import collections
import contextlib
import inspect
import io
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxstack.distributed.cluster import (
    TLS_PEER_PREFIX,
    Place,
    check_tls_files,
    is_loopback,
    local_address,
    split_address,
)
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.jax_compat import CoordinationClient, connect_cpu_collectives_at, coordination_state

Json: TypeAlias = Any
"""A value of plain JSON: None, a number, a string, or lists and dicts of them."""


def connect(place: Place, *, heartbeat_seconds: int = 10, connect_seconds: int = 300) -> None:
    """Connect this process with the other processes of its run. Call this function before any device is used.

    Afterwards, the death of a process ends the others within about `heartbeat_seconds`. Process 0 listens only on the
    coordinator's own address. Unless that is on the loopback interface, processes authenticate by mutual TLS.

    Args:
      place: the coordinator's address, the number of processes, and the index of this one.
      heartbeat_seconds: time after which a process without a heartbeat counts as dead.
      connect_seconds: time limit for all processes to connect.

    Raises:
      ConfigError: the coordinator would be open to other machines.
      JaxstackError: process 0 cannot listen at the address, or the processes do not find one another in time.
    """
    tls = _tls_options(place)
    if place.index == 0:
        _check_free(place.bind or place.coordinator)
    # Jax's only implementation without further software.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The handler of SIGTERM that this service installs would replace ours.
    if "jax_enable_preemption_service" in jax.config.values:
        jax.config.update("jax_enable_preemption_service", False)
    # Without this timer, jax aborts at its own time limit, with a C++ stack trace.
    timer = threading.Timer(connect_seconds, _exit_unconnected, (place, connect_seconds))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.count,
            place.index,
            local_device_ids=place.local_devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=place.bind or place.coordinator,
            initialization_timeout=connect_seconds + 60,
            heartbeat_timeout_seconds=heartbeat_seconds,
            # Process 0 may write reports long after the others are done. Heartbeats detect a process that dies.
            shutdown_timeout_seconds=3600,
            **tls,
        )
    except RuntimeError as error:
        raise JaxstackError(
            f"process {place.index} of {place.count} could not join {place.coordinator}: {str(error).splitlines()[0]}"
        ) from None
    finally:
        timer.cancel()
    # Only now: before, the coordinator's name may not be known yet, as of a pod that starts later.
    address = _gloo_address(place.coordinator)
    if address is not None:
        connect_cpu_collectives_at(address)


def _tls_options(place: Place) -> dict[str, Any]:
    """Return the arguments of `jax.distributed.initialize` that enable mutual TLS; empty without TLS."""
    files = check_tls_files(place.coordinator)
    if files is None:
        return {}
    if "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters:
        raise ConfigError(
            f"mutual TLS needs jax 0.11.2 or newer (this is {jax.__version__}); install it, or use no TLS."
        )
    options: dict[str, Any] = dict(zip(("mtls_cert_file", "mtls_key_file", "mtls_ca_file"), files, strict=True))
    return options | {"mtls_peer_uri_prefix": os.environ.get(TLS_PEER_PREFIX), "verify_secure_credentials": True}


def _check_free(address: str) -> None:
    """Check that this process can listen at an address, as jax would otherwise end with a segmentation fault.

    Raises:
      JaxstackError: it cannot.
    """
    host, port = split_address(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # ignores sockets of an earlier start in TIME_WAIT
            probe.bind(place)
    except OSError as error:
        raise JaxstackError(
            f"process 0 cannot listen at {address}: {error.strerror or error}. The coordinator must be an address "
            "of its host with a free port: end the process that uses it, or choose another."
        ) from None


def _exit_unconnected(place: Place, seconds: int) -> None:
    """End this process with a message that not all processes connected in time; called from a timer thread."""
    text = (
        f"jaxstack: process {place.index} waited {seconds} s (resilience.connect_seconds) at {place.coordinator}, but "
        f"not all {place.count} processes connected. Check that all are started, can reach this address, and have the "
        "same certificates.\n"
    )
    os.write(2, text.encode())
    os._exit(1)


def _gloo_address(coordinator: str) -> str | None:
    """Return the address at which Gloo is to listen: this host's in the coordinator's network; None if it has none.

    By default it is that of the host's name, which many systems map to the loopback interface.
    """
    if is_loopback(coordinator):
        return "127.0.0.1"
    with contextlib.suppress(OSError):
        return local_address(coordinator)
    return None


def _client() -> CoordinationClient:
    """Return the client of JAX's coordination service, which `connect` has set up."""
    client = coordination_state().client
    assert client is not None, "this process is not connected to others"
    return client


def process_position() -> tuple[int, int]:
    """Return the index of this process and the number of processes, without initializing any device."""
    state = coordination_state()
    return state.process_id, state.num_processes


def is_first() -> bool:
    """Return True on process 0, which prints messages and writes the files that exist once per run."""
    return process_position()[0] == 0


def publish(key: str, value: Json) -> None:
    """Store a JSON value under `key` for the other processes to read, replacing an earlier one."""
    _client().key_value_set(f"jaxstack/{key}", json.dumps(value), allow_overwrite=True)


def try_read(key: str) -> Json:
    """Return the value that a process published under `key`, or None if there is none yet."""
    try:
        return json.loads(_client().key_value_try_get(f"jaxstack/{key}"))
    except (RuntimeError, ValueError):
        return None


def wait_for_value(key: str, timeout_seconds: float) -> Json:
    """Wait until a process publishes a value under `key`, and return it.

    Raises:
      TimeoutError: none was published in time.
    """
    try:
        return json.loads(_client().blocking_key_value_get(f"jaxstack/{key}", int(1000 * timeout_seconds)))
    except RuntimeError as error:
        raise TimeoutError(str(error).splitlines()[0]) from None


_SOON_SECONDS = 1.0
"""Time before a deadline from which on a wait that ends has reached it."""
_exchanges: collections.Counter[str] = collections.Counter()


def _name_of_exchange(name: str) -> str:
    """Return a name that was not used before, so that no process reads a value of an earlier exchange."""
    _exchanges[name] += 1
    return f"{name}-{_exchanges[name]}"


def all_gather(name: str, value: Json, timeout_seconds: float = 300) -> list[Json]:
    """Gather a JSON value from every process, without using devices; return them in the order of the processes.

    Args:
      name: name of this exchange. All processes must make the same sequence of exchanges of a name.
      value: this process's value.
      timeout_seconds: time limit for all values to arrive.

    Raises:
      JaxstackError: a process does not publish its value in time; the message names it.
    """
    index, count = process_position()
    if count == 1:
        return [value]
    name = _name_of_exchange(name)
    publish(f"{name}/{index}", value)
    deadline = time.monotonic() + timeout_seconds
    values = [_wait_for_process(other, name, deadline, timeout_seconds) for other in range(count)]
    # Process 0 keeps the store, so it must not leave before all have read.
    barrier(f"{name}-read", timeout_seconds)
    return values


def all_gather_arrays(
    name: str, arrays: Mapping[str, np.ndarray], timeout_seconds: float = 3600
) -> list[dict[str, np.ndarray]]:
    """Gather named arrays from every process, without using devices; return those of each, in the order of processes.

    Other threads may use the devices meanwhile. All arrays pass through process 0's host, which is slow for large ones.

    Args:
      name: as in `all_gather`.
      arrays: of numbers or text, with any names and shapes.
      timeout_seconds: time limit for all values to arrive.

    Raises:
      JaxstackError: a process does not publish its arrays in time; the message names it.
    """
    index, count = process_position()
    if count == 1:
        return [dict(arrays)]
    name = _name_of_exchange(name)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **dict(arrays))
    client = _client()
    client.key_value_set_bytes(f"jaxstack/{name}/{index}", content.getvalue())
    deadline = time.monotonic() + timeout_seconds

    def read(other: int) -> dict[str, np.ndarray]:
        left = max(0.1, deadline - time.monotonic())
        try:
            found = client.blocking_key_value_get_bytes(f"jaxstack/{name}/{other}", int(1000 * left))
        except RuntimeError:
            raise _no_answer(other, name, deadline, timeout_seconds) from None
        with np.load(io.BytesIO(found), allow_pickle=False) as values:
            return dict(values)

    gathered = [dict(arrays) if other == index else read(other) for other in range(count)]
    barrier(f"{name}-read", timeout_seconds)
    client.key_value_delete(f"jaxstack/{name}/{index}")
    return gathered


def _wait_for_process(other: int, name: str, deadline: float, timeout_seconds: float) -> Json:
    try:
        return wait_for_value(f"{name}/{other}", max(0.1, deadline - time.monotonic()))
    except TimeoutError:
        raise _no_answer(other, name, deadline, timeout_seconds) from None


def _no_answer(other: int, name: str, deadline: float, seconds: float) -> JaxstackError:
    """Return the error for a wait that reached its deadline, or that JAX ended before it, as a process is gone."""
    process = f"process {other} of {process_position()[1]}"
    if deadline - time.monotonic() > _SOON_SECONDS:
        return JaxstackError(f"{process}, or the first one, has ended before it answered ({name}); see its log.")
    return JaxstackError(f"{process} did not answer ({name}) within {seconds:.0f} s; see its log.")


_AGREE_SECONDS = 3600
"""Time limit of agreements; long, because a process may be hashing a large checkpoint. Dead processes are detected by
their heartbeat, stuck ones by the launcher."""


def all_true(value: bool) -> bool:
    """Return True if `value` is True on every process; all processes must call it.

    All processes must make the same sequence of calls to this function and `broadcast_from_first`, from one thread.

    Raises:
      JaxstackError: a process does not answer in time.
    """
    return all(all_gather("all", value, _AGREE_SECONDS))


def broadcast_from_first(value: Json) -> Json:
    """Return process 0's `value` on all processes; all must call it, as described for `all_true`."""
    if process_position()[1] == 1:
        return value
    name = _name_of_exchange("first")
    if is_first():
        publish(f"{name}/0", value)
        return value
    return _wait_for_process(0, name, time.monotonic() + _AGREE_SECONDS, _AGREE_SECONDS)


def barrier(name: str, timeout_seconds: float = 300) -> None:
    """Wait until all processes have reached this call.

    Args:
      name: name of this barrier, which all processes pass; it must not be used a second time.
      timeout_seconds: time limit.

    Raises:
      JaxstackError: not all processes came in time.
    """
    if process_position()[1] == 1:
        return
    try:
        _client().wait_at_barrier(f"jaxstack/{name}", int(1000 * timeout_seconds))
    except RuntimeError as error:
        raise JaxstackError(f"not all processes reached the barrier {name}: {str(error).splitlines()[0]}") from None


_LOST_PEER = re.compile(r"gloo|nccl|unavailable|coordination|connection|deadline|heartbeat", re.IGNORECASE)


def as_lost_peer(error: Exception) -> JaxstackError | None:
    """Return a JaxstackError if `error`, raised by JAX, means that another process of the run died; otherwise None."""
    first = str(error).splitlines()[0] if str(error) else ""
    if (
        coordination_state().client is None
        or not isinstance(error, jax.errors.JaxRuntimeError)
        or not _LOST_PEER.search(str(error))
    ):
        return None
    return JaxstackError(f"process {coordination_state().process_id} lost another process of the run: {first}")


_abandoned = threading.Event()


def abandon_thread() -> None:
    """Note that a thread of a library waits for what will not come, so that this process exits without it."""
    _abandoned.set()


def exit_at_once_on_failure(code: int) -> int:
    """Exit at once without cleanup if `code` is an error and the run has several processes; otherwise return `code`.

    At a normal exit jax waits for the other processes, which may be waiting for this one in a collective; and Python
    waits for all threads, so that a process with an abandoned one exits at once too, after the others were waited for.
    """
    if coordination_state().client is None:
        return code
    if code in (0, 130, 143):
        if not _abandoned.is_set():
            return code
        jax.distributed.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
