"""The processes of one run: how they join, and how they tell one another small facts without a device."""

import inspect
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from typing import Any

import jax

from jaxstack.distributed.cluster import TLS_PEER_PREFIX, Place, check_trust, is_loopback, split_address
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.jax_compat import CoordinationClient, coordination_state, keep_cpu_collectives_on_loopback


def join(place: Place, *, heartbeat_seconds: int = 10, connect_seconds: int = 300) -> None:
    """Connects this process with the others of its run. Before any use of a device.

    From then on a process that dies ends the others within about `heartbeat_seconds`. Process 0 listens on the
    coordinator's own address only; off the loopback interface the processes prove themselves by mutual TLS.

    Raises:
      ConfigError: the coordinator would be open to other machines.
      JaxstackError: process 0 cannot listen there, or the processes do not find one another in `connect_seconds`.
    """
    files = check_trust(place.coordinator)
    options: dict[str, Any] = {}
    if files is not None:
        if "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters:
            raise ConfigError(
                f"mutual TLS needs jax 0.11.2 or newer (this is {jax.__version__}); install it, or use no TLS."
            )
        options = dict(zip(("mtls_cert_file", "mtls_key_file", "mtls_ca_file"), files, strict=True))
        options |= {"mtls_peer_uri_prefix": os.environ.get(TLS_PEER_PREFIX), "verify_secure_credentials": True}
    if place.index == 0:
        _check_free(place.bind or place.coordinator)
    _keep_cpu_on_loopback(place)
    # Its handler of SIGTERM would take the place of ours.
    if "jax_enable_preemption_service" in jax.config.values:
        jax.config.update("jax_enable_preemption_service", False)
    # jax itself would abort with the stack of its C++ code.
    limit = threading.Timer(connect_seconds, _end_alone, (place, connect_seconds))
    limit.daemon = True
    limit.start()
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
            # The first process may write reports long after the others are done; one that dies is noticed otherwise.
            shutdown_timeout_seconds=3600,
            **options,
        )
    except RuntimeError as error:
        raise JaxstackError(
            f"process {place.index} of {place.count} could not join {place.coordinator}: {str(error).splitlines()[0]}"
        ) from None
    finally:
        limit.cancel()


def _check_free(address: str) -> None:
    """Raises JaxstackError where this process cannot listen; jax itself would end with a segmentation fault."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what an earlier start left in TIME_WAIT
            probe.bind(place)
    except OSError as error:
        raise JaxstackError(
            f"process 0 cannot listen at {address}: {error.strerror or error}. The coordinator is an address of its "
            "host with a port that nothing else uses: end what holds it, or give another."
        ) from None


def _end_alone(place: Place, seconds: int) -> None:
    text = (
        f"jaxstack: process {place.index} waited {seconds} s (resilience.connect_seconds) at {place.coordinator}, but "
        f"not all {place.count} processes came. Are all of them started, can they reach this address, and do they have "
        "the same certificates?\n"
    )
    os.write(2, text.encode())
    os._exit(1)


def _keep_cpu_on_loopback(place: Place) -> None:
    """CPU collectives between processes: jax has one implementation without further software, Gloo.

    It listens on the address that the host's name stands for, and jax has no setting for that.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if is_loopback(place.coordinator):
        keep_cpu_collectives_on_loopback()


def _client() -> CoordinationClient:
    """Return the connection with the coordinator, which `join` made."""
    client = coordination_state().client
    assert client is not None, "this process has not joined others"
    return client


def position() -> tuple[int, int]:
    """(index, count) of this process, known before any device is."""
    state = coordination_state()
    return state.process_id, state.num_processes


def is_first() -> bool:
    """Whether this is the process that writes what is written once, and reports."""
    return position()[0] == 0


def publish(key: str, value: Any) -> None:
    """Lets the other processes read plain JSON under `key`; a later value takes the place of an earlier."""
    _client().key_value_set(f"jaxstack/{key}", json.dumps(value), allow_overwrite=True)


def peek(key: str) -> Any:
    """What was published under `key`; None where nothing was."""
    try:
        return json.loads(_client().key_value_try_get(f"jaxstack/{key}"))
    except (RuntimeError, ValueError):
        return None


def await_value(key: str, timeout_seconds: float) -> Any:
    """Waits for what is published under `key`. Raises TimeoutError."""
    try:
        return json.loads(_client().blocking_key_value_get(f"jaxstack/{key}", int(1000 * timeout_seconds)))
    except RuntimeError as error:
        raise TimeoutError(str(error).splitlines()[0]) from None


def exchange(name: str, value: Any, timeout_seconds: float = 300) -> list[Any]:
    """Every process's `value`, in their order. Each name serves once.

    Raises:
      JaxstackError: a process does not say its value in time; the message names it.
    """
    index, count = position()
    if count == 1:
        return [value]
    publish(f"{name}/{index}", value)
    deadline = time.monotonic() + timeout_seconds
    found = [_answer(other, name, deadline, timeout_seconds) for other in range(count)]
    # Nobody leaves, and takes the store with it, before all have read.
    meet(f"{name}-read", timeout_seconds)
    return found


def _answer(other: int, name: str, deadline: float, timeout_seconds: float) -> Any:
    try:
        return await_value(f"{name}/{other}", max(0.1, deadline - time.monotonic()))
    except TimeoutError:
        raise JaxstackError(
            f"process {other} of {position()[1]} did not answer ({name}) within {timeout_seconds:.0f} s; look at its "
            "log."
        ) from None


_turns = itertools.count()
_PATIENCE_SECONDS = 3600
"""One may still hash a large checkpoint. A dead process is noticed by its heartbeat, a stuck one by the launcher."""


def all_true(value: bool) -> bool:
    """Whether `value` holds on every process. All of them ask alike, in the same order, from one thread.

    Raises:
      JaxstackError: as `exchange`.
    """
    return all(exchange(f"all-{next(_turns)}", value, _PATIENCE_SECONDS))


def first_says(value: Any) -> Any:
    """The first process's `value`, plain JSON, on all. Asked as `all_true` is."""
    if position()[1] == 1:
        return value
    name = f"first-{next(_turns)}"
    if is_first():
        publish(f"{name}/0", value)
        return value
    return _answer(0, name, time.monotonic() + _PATIENCE_SECONDS, _PATIENCE_SECONDS)


def meet(name: str, timeout_seconds: float = 300) -> None:
    """Waits until all processes are here. Each name serves once. Raises JaxstackError."""
    if position()[1] == 1:
        return
    try:
        _client().wait_at_barrier(f"jaxstack/{name}", int(1000 * timeout_seconds))
    except RuntimeError as error:
        raise JaxstackError(f"not all processes came to {name}: {str(error).splitlines()[0]}") from None


_LOST = re.compile(r"gloo|nccl|unavailable|coordination|connection|deadline|heartbeat", re.IGNORECASE)


def explain_loss(error: Exception) -> JaxstackError | None:
    """The error as one of a peer that has gone, where it reads like one and there are peers."""
    first = str(error).splitlines()[0] if str(error) else ""
    if (
        coordination_state().client is None
        or not isinstance(error, jax.errors.JaxRuntimeError)
        or not _LOST.search(str(error))
    ):
        return None
    return JaxstackError(f"process {coordination_state().process_id} lost another process of the run: {first}")


def end(code: int) -> int:
    """The last thing that a command does: returns `code`, or, after a failure among several processes, ends here.

    At its usual end jax waits for the others, which may be waiting for this one in a collective.
    """
    if code in (0, 130, 143) or coordination_state().client is None:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
