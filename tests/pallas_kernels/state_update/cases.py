"""Arguments of `update_states` for its tests, and its result by loops over rows and heads in float64."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of a call: R rows, S slots, K key heads, N value heads of D key and V value channels."""

    rows: int = 3
    slots: int = 5
    key_heads: int = 2
    heads: int = 4
    keys: int = 16
    values: int = 16
    channels: bool = False
    corrects: bool = True
    key_axis: int = 2
    dtype: str = "float32"

    def arguments(self) -> dict[str, Any]:
        """Arguments of the call; the second row is padding, the third one begins in a slot that has numbers."""
        random = np.random.default_rng(0)
        rows, heads, keys, values = self.rows, self.heads, self.keys, self.values
        widths = (keys, values) if self.key_axis == 2 else (values, keys)
        slots = random.permutation(self.slots)[:rows]
        slots[1] = self.slots
        decays = (rows, heads, keys) if self.channels else (rows, heads)
        found = {
            "states": random.normal(size=(self.slots, heads, *widths)).astype(np.float32),
            "slots": slots.astype(np.int32),
            "q": random.normal(size=(rows, self.key_heads, keys)),
            "k": random.normal(size=(rows, self.key_heads, keys)) / keys**0.5,
            "v": random.normal(size=(rows, heads, values)),
            "log_decay": -random.uniform(0, 2, decays).astype(np.float32),
            "beta": random.uniform(0, 1, (rows, heads)).astype(np.float32) if self.corrects else None,
            "begins": np.arange(rows) == 2,
        }
        return found | {name: found[name].astype(self.dtype) for name in ("q", "k", "v")}

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call that are no arrays."""
        return {"key_axis": self.key_axis}


CASES = {
    "delta": Case(),
    "decays_of_channels": Case(channels=True),
    "as_many_key_heads": Case(key_heads=4),
    "odd_widths": Case(keys=20, values=12),
    "wide": Case(heads=2, key_heads=1, keys=128, values=128),
    "state_space": Case(key_heads=1, corrects=False, key_axis=3, values=24),
    "half": Case(dtype="float16"),
}


def expected(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of the rows, and the states of all slots."""
    given = case.arguments()
    states = given["states"].astype(np.float64)
    out = np.zeros(given["v"].shape)
    for row, slot in enumerate(given["slots"]):
        for head in range(case.heads):
            key_head = head // (case.heads // case.key_heads)
            q, k = (given[name][row, key_head].astype(np.float64) for name in "qk")
            new = given["v"][row, head].astype(np.float64)
            if slot >= case.slots:
                continue
            state = states[slot, head] if case.key_axis == 2 else states[slot, head].T
            state = state * (0 if given["begins"][row] else 1)
            state = state * np.exp(given["log_decay"][row, head].astype(np.float64)).reshape(-1, 1)
            if case.corrects:
                new = given["beta"][row, head] * (new - k @ state)
            state = state + np.outer(k, new)
            out[row, head] = q @ state
            states[slot, head] = state if case.key_axis == 2 else state.T
    return out, states


def assert_equal(found: tuple[Any, Any], case: Case) -> None:
    """The outputs of rows that are no padding, and all states, are those of the loops."""
    out, states = (np.asarray(x, np.float64) for x in found)
    wanted, kept = expected(case)
    own = case.arguments()["slots"] < case.slots
    tolerance = 1e-5 if case.dtype == "float32" else 2e-2
    np.testing.assert_allclose(out[own], wanted[own], atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(states, kept, atol=1e-5, rtol=1e-5)
