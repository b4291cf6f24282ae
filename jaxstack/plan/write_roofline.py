"""Writes a picture of the operators of a train step on a device's roofline as an SVG file."""

from pathlib import Path
from typing import Any

from jaxstack.errors import ConfigError, cannot_write
from jaxstack.files import write_file
from jaxstack.observe.report.roofline import draw_roofline
from jaxstack.plan.resolve import resolve_plan
from jaxstack.plan.roofline import describe_roofline, find_peak
from jaxstack.run_config import RunConfig


def write_roofline(config: RunConfig, devices: int | None, device: str, path: str | Path) -> dict[str, Any]:
    """Draw the operators of a train step on a device's roofline into an SVG file; return them as plain JSON.

    Args:
      config: configuration of the run.
      devices: number of devices; default: see `describe_plan`.
      device: kind of device, such as "h200".
      path: the SVG file to write.

    Raises:
      ConfigError: the layout is not possible, the device is not known, or the file cannot be written.
    """
    if Path(path).suffix.lower() != ".svg":
        raise ConfigError(f"--roofline {path} must be an SVG file: give a name that ends in .svg.")
    peak = find_peak(device)
    if peak is None:
        raise ConfigError(
            f"--device: the peak rates of {device} are not known; known are h200, h100, a100, l40s, gb200."
        )
    record = describe_roofline(resolve_plan(config, devices)[0], peak)
    try:
        write_file(Path(path), draw_roofline(record).encode(), durable=False)
    except OSError as error:
        raise cannot_write(f"the picture {path}", error) from None
    return record
