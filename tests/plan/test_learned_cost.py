"""The learned correction of the roofline: features of compiled programs, errors on families that it has not seen."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.errors import ConfigError
from jaxstack.plan.learned_cost import (
    LearnedCost,
    MeasuredProgram,
    ProgramFeatures,
    fit_cost,
    held_out_predictions,
    kendall_tau,
    matmul_features,
    median_error,
    parse_program_features,
    read_programs,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def features_of(function, *arguments) -> ProgramFeatures:
    return parse_program_features(jax.jit(function).lower(*arguments).compile().as_text())


def test_features_of_a_matmul():
    found = features_of(jnp.matmul, jnp.zeros((1024, 256)), jnp.zeros((256, 512)))
    assert found.dot_flops == {"small": 0.0, "middle": 2 * 1024 * 256 * 512, "large": 0.0}
    assert found.kernel_bytes == 4 * (1024 * 256 + 256 * 512 + 1024 * 512)
    assert found.kernels == 1 and found.trips == 0 and found.collective_bytes == {}
    assert ProgramFeatures.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_features_of_a_loop_count_its_iterations():
    x = jnp.zeros((16, 8, 32))
    w = jnp.zeros((32, 32))
    found = features_of(lambda x, w: jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), x[0], x)[0], x, w)
    assert found.trips == 16 and found.dot_flops["small"] == 16 * 2 * 8 * 32 * 32
    assert found.transcendentals == 16 * 8 * 32 and found.kernels >= 16


def test_features_of_an_elementwise_program():
    found = features_of(lambda x: jnp.exp(-x), jnp.zeros(1000))
    assert found.transcendentals == 1000 and found.kernel_bytes == 8000 and sum(found.dot_flops.values()) == 0


def test_roofline_takes_the_slower_of_arithmetic_and_memory():
    found = matmul_features(1000, 1000, 1000, 2)
    assert found.roofline_seconds(1e9, 1e12) == pytest.approx(2.0)
    assert found.roofline_seconds(1e15, 1e6) == pytest.approx(6.0)


def test_kendall_tau_and_median_error():
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1 and kendall_tau([4, 3, 2, 1], [1, 2, 3, 4]) == -1
    assert kendall_tau([1, 2, 4, 3], [1, 2, 3, 4]) == pytest.approx((5 - 1) / 6)
    assert median_error([1.0, 2.0, 6.0], [1.0, 1.0, 4.0]) == 0.5


def test_a_known_correction_is_found():
    """Times that are a multiple of the roofline, by the size of the matmuls: 2 for large ones, 8 for small ones."""
    programs = []
    for rows in (16, 24, 32, 48, 1024, 2048, 3072, 4096):
        features = matmul_features(rows, rows, rows, 0.001)
        seconds = features.roofline_seconds(1e9, 1e12) * (8 if rows < 64 else 2)
        programs.append(MeasuredProgram("small" if rows < 64 else "large", features, seconds, 1e9, 1e12))
    cost = fit_cost(programs, penalty=1e-6)
    for one in programs:
        assert cost.predict(one.features, 1e9, 1e12) == pytest.approx(one.seconds, rel=0.02)


def test_saved_and_loaded(tmp_path):
    cost = LearnedCost(np.arange(8.0), (-1.0, 2.0))
    cost.save(tmp_path / "cost.json")
    loaded = LearnedCost.load(tmp_path / "cost.json")
    np.testing.assert_array_equal(loaded.weights, cost.weights)
    assert loaded.bounds == cost.bounds
    (tmp_path / "cost.json").write_text("{}")
    with pytest.raises(ConfigError, match="no learned cost model .* benchmarks/planning/learned_cost.py"):
        LearnedCost.load(tmp_path / "cost.json")


def test_a_prediction_stays_within_what_was_measured():
    features = matmul_features(64, 64, 64, 4)
    cost = LearnedCost(np.full(8, 1e6), (0.0, math.log(3)))
    assert cost.predict(features, 1e9, 1e9) == pytest.approx(3 * features.roofline_seconds(1e9, 1e9))


def _scores(programs: list[MeasuredProgram]) -> tuple[float, float, float, float]:
    """Median error and Kendall's tau of the roofline, and of a correction that has not seen the program's family."""
    found = list(held_out_predictions(programs))
    measured = [one.seconds for one, _ in found]
    learned = [value for _, value in found]
    roofline = [one.roofline_seconds for one, _ in found]
    return (
        median_error(roofline, measured),
        median_error(learned, measured),
        kendall_tau(roofline, measured),
        kendall_tau(learned, measured),
    )


def test_held_out_families_of_measured_programs():
    """Programs that were compiled and timed on an H200, see benchmarks/planning/learned_cost.py."""
    programs = read_programs(RESULTS / "learned_cost.jsonl", "NVIDIA H200")
    assert read_programs(RESULTS / "learned_cost.jsonl", "no such device") == []
    assert len(programs) > 100 and len({one.family for one in programs}) > 10
    roofline, learned, roofline_tau, learned_tau = _scores(programs)
    assert learned < 0.5 * roofline and learned_tau > roofline_tau + 0.05
    # Nor is the constant that the roofline is off by on average the whole of it.
    constant = float(np.median([one.seconds / one.roofline_seconds for one in programs]))
    scaled = [constant * one.roofline_seconds for one in programs]
    assert learned < median_error(scaled, [one.seconds for one in programs])


def test_held_out_dtypes_of_matmuls_on_a_gpu():
    """Matmuls of an H200 in bfloat16, FP8 and int8; each dtype is predicted from the two others."""
    peaks = {"bf16": (989e12, 2), "fp8": (1979e12, 1), "int8": (1979e12, 1)}
    programs = []
    for line in (RESULTS / "device.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["work"].startswith("gemm") and row["device"] == "NVIDIA H200":
            _, dtype, rows, _, summed, _, columns = row["work"].split()
            peak, itemsize = peaks[dtype]
            features = matmul_features(int(rows), int(summed), int(columns), itemsize)
            programs.append(MeasuredProgram(dtype, features, row["milliseconds"] / 1e3, peak, 4.8e12))
    assert len(programs) >= 21
    roofline, learned, roofline_tau, learned_tau = _scores(programs)
    assert learned < 0.2 * roofline
    assert learned_tau > roofline_tau - 0.02  # FP8 and int8 take nearly the same time, in either order


def test_families_are_held_out_as_a_whole():
    features = matmul_features(64, 64, 64, 4)
    programs = [MeasuredProgram(name, features, 1.0, 1e9, 1e9) for name in "aabbc"]
    seen = []

    def fit(part):
        seen.append(sorted({one.family for one in part}))
        return fit_cost(part)

    assert len(list(held_out_predictions(programs, fit))) == 5
    assert seen == [["b", "c"], ["a", "c"], ["a", "b"]]
