"""Tiles and charts of a run's energy, GPU-hours and cost for its report."""

from collections.abc import Mapping

from jaxstack.observe.number_format import short_number, si_number
from jaxstack.observe.report.chart import Chart, Curve
from jaxstack.observe.report.series import Series, make_series

KEYS = ("power_watts", "joules_per_token", "total_joules_per_token", "energy_kwh", "gpu_hours", "cost")
"""Keys of a metrics line, see `jaxstack.observe.energy.EnergyMeter.read`."""


def energy_tiles(metrics: Mapping[str, Series], ended: object) -> list[tuple[str, str, str]]:
    """Return (label, value, note) tiles of the total energy, GPU-hours and cost of a run.

    Args:
      metrics: the series of the run; their last values are used while the run trains.
      ended: the same values at the end of the run, from `environment.json`, if it has ended.
    """
    last = {key: metrics[key].last for key in KEYS if key in metrics}
    if isinstance(ended, Mapping):
        last |= {key: ended[key] for key in KEYS if isinstance(ended.get(key), int | float)}
    found: list[tuple[str, str, str]] = []
    if (kwh := last.get("energy_kwh")) is not None:
        joules = last.get("total_joules_per_token")
        note = f"{si_number(joules)}J per token, with all overhead" if joules is not None else ""
        found.append(("Energy", f"{short_number(kwh)} kWh", note))
    if (hours := last.get("gpu_hours")) is not None:
        found.append(("GPU-hours", short_number(hours), "over all starts"))
    if (cost := last.get("cost")) is not None:
        found.append(("Cost", f"{cost:,.2f}", "GPU-hours × observe.price_per_gpu_hour"))
    return found


def energy_charts(metrics: Mapping[str, Series]) -> list[Chart]:
    """Return the charts of a run's power and of its energy per token."""
    empty = make_series([])
    in_steps = Curve("in steps", metrics.get("joules_per_token", empty).scaled(1000))
    overall = Curve("with overhead", metrics.get("total_joules_per_token", empty).scaled(1000), "second")
    power = Curve("all GPUs", metrics.get("power_watts", empty))
    return [
        Chart("Energy per token", [in_steps, overall], "mJ", from_zero=True),
        Chart("Power", [power], "W", from_zero=True),
    ]
