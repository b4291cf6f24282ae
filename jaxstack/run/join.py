"""Joins the processes of a job, for commands that compute with the devices of all of them."""

import os
from collections.abc import Mapping
from typing import Any

from jaxstack.distributed.cluster import find_place
from jaxstack.distributed.coordination import connect
from jaxstack.resilience.config import ResilienceConfig
from jaxstack.resilience.exit_on_signal import print_stacks_on_signal
from jaxstack.resilience.preflight import check_program
from jaxstack.resilience.progress_file import STACKS, ProgressFile


def join_job(settings: Mapping[str, Any], limits: ResilienceConfig | None = None) -> list[str]:
    """Connect this process with the others of its job, if there are any, and check that all run the same program.

    To be called before any device is used. Afterwards JAX sees the devices of all processes.

    Args:
      settings: what the processes are asked to do, which has to be the same for all.
      limits: `heartbeat_seconds` and `connect_seconds`; default: `ResilienceConfig()`.

    Returns:
      Warnings about differences between the processes.

    Raises:
      ConfigError: the processes differ, or the coordinator would be open to other machines.
      JaxstackError: the processes do not find one another in time.
    """
    if STACKS in os.environ:
        print_stacks_on_signal()
    ProgressFile.of_this_process().note()  # a launcher counts how long processes are silent that wait for one another
    place = find_place()
    limits = limits or ResilienceConfig()
    if place is None:
        return []
    connect(place, heartbeat_seconds=limits.heartbeat_seconds, connect_seconds=limits.connect_seconds)
    return check_program(settings, limits.connect_seconds)
