"""The learning-rate finder against closed forms, and on a real model."""

import numpy as np
import pytest

from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.run_config import load_config
from jaxstack.tune.learning_rate import (
    ExponentialRise,
    RateRange,
    average,
    diverged_at,
    find_learning_rate,
    smooth,
    suggest_rates,
)

RATES = RateRange(1e-6, 1.0, 121)


def test_the_schedule_rises_by_one_factor_to_the_peak():
    rise = ExponentialRise(initial_fraction=1e-6).make_multiplier(121)
    found = np.array([float(rise(step)) for step in range(121)])
    assert found == pytest.approx(RATES.rates(), rel=1e-4)


def test_the_average_has_no_bias_towards_zero():
    assert average(np.full(50, 3.0)) == pytest.approx(3.0)
    assert average(np.array([1.0, 2.0]), 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 2) / 0.75])


def test_smoothing_has_neither_bias_nor_lag():
    assert smooth(np.full(50, 3.0)) == pytest.approx(3.0)
    step = smooth(np.repeat([2.0, 1.0], 50))
    assert step[49] + step[50] == pytest.approx(3.0) and np.argmin(np.gradient(step)) in (49, 50)
    assert smooth(np.array([1.0, 2.0]), 0.5) == pytest.approx([(1 + 0.5 * 2) / 1.5, (0.5 * 1 + 2) / 1.5])


def test_the_search_ends_where_the_loss_is_four_times_its_minimum():
    assert diverged_at(np.array([4.0, 2.0, 7.9, 8.1, 1.0])) == 3
    assert diverged_at(np.array([4.0, np.nan])) == 1
    assert diverged_at(np.array([4.0, 2.0])) == 2


def test_suggestions_of_a_known_curve():
    """A loss that falls as a sigmoid around 1e-3 and rises from 1e-1 on."""
    logs = np.log10(RATES.rates())
    finding = suggest_rates(RATES.rates(), 4 - 3 / (1 + np.exp(-6 * (logs + 3))) + 400 * np.maximum(logs + 1, 0) ** 2)
    assert np.log10(finding.steepest) == pytest.approx(-3, abs=0.1)
    assert -2.2 < np.log10(finding.rates[np.argmin(finding.averages)]) < -1, "the valley is flat"
    assert finding.tenth_of_minimum == pytest.approx(finding.rates[np.argmin(finding.averages)] / 10)
    assert min(finding.steepest, finding.tenth_of_minimum) <= finding.suggestion
    assert finding.suggestion <= max(finding.steepest, finding.tenth_of_minimum)
    assert len(finding.rates) < 121, "it ends where the loss diverges"


def test_refusals():
    with pytest.raises(JaxstackError, match="never falls"):
        suggest_rates(RATES.rates(), np.linspace(1, 3, 121))
    for low, high, steps in ((0, 1, 100), (1, 1, 100), (1e-3, float("inf"), 100), (1e-3, 1, 5)):
        with pytest.raises(ConfigError):
            RateRange(low, high, steps)


@pytest.mark.longer
def test_a_real_model_learns_with_the_rate_that_it_finds(tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("the quick brown fox jumps over the lazy dog; " * 400)
    config = load_config(
        None,
        [
            f"run.dir={tmp_path}", "model.hidden_size=32", "model.num_layers=1", "model.num_heads=2",
            f"data.sources=[{{path: {texts}}}]", "data.tokenizer.name=byte", f"data.cache_dir={tmp_path}/tokens",
            "data.held_out_fraction=0.0", "train.sequence_length=32", "train.global_batch_size=8", "parallel.data=-1",
        ],
    )  # fmt: skip
    said: list[str] = []
    found = find_learning_rate(config, RateRange(1e-5, 10.0, 60), report=said.append)
    assert 1e-4 < found.suggestion < 0.3
    assert found.averages.min() < found.losses[0] - 0.3
    assert found.page is not None and "Steepest descent" in found.page.read_text()
    assert not (tmp_path / "run" / "checkpoints").exists()
