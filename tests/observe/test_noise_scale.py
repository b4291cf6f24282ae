"""Running means of the gradient noise, and their resume."""

import numpy as np
import pytest

from jaxstack.observe.config import ObserveConfig
from jaxstack.observe.noise_scale import NoiseScale, noise_problem
from jaxstack.run_config import load_config


def step_values(signal: float, noise: float) -> dict[str, float]:
    return {"loss": 1.0, "gradient_signal": signal, "gradient_noise": noise}


def test_means_of_few_steps_are_plain():
    scale = NoiseScale()
    scale.update(step_values(1.0, 10.0))
    assert scale.update(step_values(3.0, 30.0)) == step_values(2.0, 20.0) | {"noise_scale": 10.0}


def test_means_of_many_steps_are_exponential():
    scale = NoiseScale()
    for _ in range(100):
        scale.update(step_values(1.0, 5.0))
    assert scale.update(step_values(2.0, 5.0))["gradient_signal"] == pytest.approx(0.99 * 1.0 + 0.01 * 2.0)


def test_a_resumed_run_goes_on():
    whole = NoiseScale()
    first = NoiseScale()
    random = np.random.default_rng(0)
    steps = [step_values(*random.normal([1.0, 10.0], 0.1)) for _ in range(150)]
    for values in steps[:120]:
        logged = first.update(values)
        whole.update(values)
    resumed = NoiseScale(120, logged)
    for values in steps[120:]:
        assert resumed.update(values) == pytest.approx(whole.update(values))


def test_steps_that_are_not_finite_and_negative_means_give_no_scale():
    scale = NoiseScale()
    assert "noise_scale" not in scale.update(step_values(-1.0, 10.0))
    assert scale.update(step_values(float("nan"), 1.0))["gradient_signal"] == -1.0
    assert scale.update({"loss": 2.0}) == {"loss": 2.0}


def test_layouts_that_cannot_be_measured():
    assert noise_problem(2, {"data": 2, "fsdp": 4}) is None
    assert "gradient_accumulation of at least 2; found 1" in (noise_problem(1, {}) or "")
    assert "parallel.pipeline=2" in (noise_problem(4, {"pipeline": 2}) or "")
    assert "parallel.context=4" in (noise_problem(4, {"context": 4}) or "")


def test_a_configuration_without_microbatches_is_refused():
    with pytest.raises(Exception, match="observe.noise_scale compares microbatches .* set it to 2 or"):
        load_config(None, ["observe.noise_scale=true"])
    config = load_config(None, ["observe.noise_scale=true", "train.gradient_accumulation=2"])
    assert config.observe.noise_scale and not ObserveConfig().noise_scale


def test_a_ramp_whose_smallest_batch_is_one_microbatch_is_refused():
    ramp = ["observe.noise_scale=true", "train.global_batch_size=8", "train.batch_ramp.double_at_tokens=[1000,4000]"]
    with pytest.raises(Exception, match="smallest batch of train.batch_ramp .* set it to 8, or"):
        load_config(None, [*ramp, "train.gradient_accumulation=4"])
    assert load_config(None, [*ramp, "train.gradient_accumulation=8"]).observe.noise_scale
