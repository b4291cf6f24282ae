"""Process of one trial of a study: `python -m jaxstack.tune.trial DIR` trains DIR/config.yaml, writes outcome.json."""

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxstack.errors import ConfigError, JaxstackError, memory_shortage
from jaxstack.files import write_json
from jaxstack.resilience.exit_on_signal import ExitOnSignal

OUTCOME = "outcome.json"
LOG = "log.txt"
"""Files of a trial's directory: how it ended, and all that it printed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train the trial in the given directory; resume it if it has a checkpoint.

    Returns:
      0 if the outcome is written, whatever it is; 128 + number if a signal stopped the trial, which can go on.
    """
    (name,) = sys.argv[1:] if argv is None else argv
    directory = Path(name)
    log = os.open(directory / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with ExitOnSignal("jaxstack tune"):
        from jaxstack.resilience.stop_request import Interrupted

        try:
            outcome = _train(directory)
        except Interrupted as stopped:
            print(stopped, flush=True)
            return stopped.exit_code
        write_json(directory / OUTCOME, outcome)
        return 0


def _train(directory: Path) -> dict[str, Any]:
    """Train the trial in a directory; return its outcome (state, metrics or reason) as plain data."""
    from jaxstack.distributed.device_setup import memory_per_device
    from jaxstack.resilience.stop_request import Interrupted
    from jaxstack.run.memory_check import DoesNotFit
    from jaxstack.run.train import train
    from jaxstack.run_config import load_config

    try:
        trained = train(load_config(directory / "config.yaml"))
    except DoesNotFit as error:
        return {"state": "memory", "reason": str(error), "memory_excess": error.needed / error.available - 1}
    except Interrupted:
        raise
    except JaxstackError as error:
        return {"state": "configuration" if isinstance(error, ConfigError) else "failed", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        exhausted = isinstance(error, MemoryError) or memory_shortage(error) is not None
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return {"state": "memory" if exhausted else "failed", "reason": reason}
    peak = trained.metrics.get("peak_memory_bytes")
    available = memory_per_device()
    excess = peak / available - 1 if peak and available else None
    return {"state": "complete", "metrics": dict(trained.metrics), "memory_excess": excess}


if __name__ == "__main__":
    sys.exit(main())
