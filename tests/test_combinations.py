"""Every pair of features is refused with one message before anything starts, or takes a step."""

import itertools
import math
import re

import jax
import numpy as np
import pytest

from jaxstack.config.features import Feature, are_alternatives, find_exclusion, find_remark
from jaxstack.errors import ConfigError
from jaxstack.run.build import make_trainer
from jaxstack.run_config import FEATURES, load_config
from scripts.pages.combinations import PAGES
from tests.combinations import BASE, VOCABULARY, combined, write_model_config
from tests.small_runs import batch_at, run_steps, unpacked_batch_at

KINDS = {name for feature in FEATURES for name in feature.also}
TRIED = [feature for feature in FEATURES if feature.name not in KINDS]
PAIRS = [pair for pair in itertools.combinations(TRIED, 2) if not are_alternatives(*pair)]
REFUSED = [pair for pair in PAIRS if find_exclusion(FEATURES, *pair)]
NOT_STEPPED = {"evaluation tasks", "separate runs"}
"""Features of the loop around the steps, which need the evaluation harness, or other runs."""
WORKING = [
    pair
    for pair in PAIRS
    if not find_exclusion(FEATURES, *pair) and NOT_STEPPED.isdisjoint(feature.name for feature in pair)
]
QUICK = ("pipeline + quantization-aware training", "context parallelism + Muon")


def title(pair: tuple[Feature, ...]) -> str:
    return " + ".join(feature.name for feature in pair)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    write_model_config(found)
    return found


def step(directory, *features: Feature) -> float:
    """The loss of a step of a run that uses these features."""
    remark = find_remark(*features) if len(features) == 2 else None
    config = combined(directory, *features, further=remark.turn_on if remark else ())
    for feature in features:
        assert feature.used(getattr(config, feature.section)), feature.name
    devices = math.prod(config.parallel.degrees.values()) * config.parallel.workers
    length = config.train.sequence_length

    def batch(step: int) -> dict[str, np.ndarray]:
        if config.policy.loss is not None:
            found = unpacked_batch_at(step, 16, length, VOCABULARY)
            return {**found, **{name: np.full((16, length), 0.1, np.float32) for name in config.policy.arrays}}
        if config.preference.loss is None:
            return batch_at(step, 16, length, VOCABULARY)
        return {name: x.reshape(16, 2, length) for name, x in unpacked_batch_at(step, 32, length, VOCABULARY).items()}

    return run_steps(make_trainer(config, batch, jax.devices()[:devices]), 1)[0]


@pytest.mark.longer
@pytest.mark.parametrize("pair", [pair for pair in WORKING if title(pair) in QUICK], ids=title)
def test_features_work_together(directory, pair):
    assert math.isfinite(step(directory, *pair))


@pytest.mark.parametrize("pair", WORKING, ids=title)
def test_every_pair_that_is_not_refused_takes_a_step(directory, pair):
    assert math.isfinite(step(directory, *pair))


def test_every_refused_pair_gives_one_message(directory):
    for pair in REFUSED:
        with pytest.raises(ConfigError) as caught:
            combined(directory, *pair)
        message = str(caught.value)
        excluded = find_exclusion(FEATURES, *pair)
        beginning = re.split(r"[{(;]", excluded.message)[0].strip()
        assert beginning in message and "\n" not in message, (title(pair), message)


def test_declarations_name_features_that_there_are():
    names = [feature.name for feature in FEATURES]
    assert len(names) == len(set(names)) and set(names) >= KINDS
    for feature in FEATURES:
        others = [one.other for one in (*feature.excludes, *feature.remarks)]
        assert set(others) <= set(names) and len(others) == len(set(others)), feature.name
        if feature.name not in KINDS:
            assert feature.turn_on, feature.name


def test_nothing_is_on_by_default():
    config = load_config(None, BASE)
    assert not [feature.name for feature in FEATURES if feature.used(getattr(config, feature.section))]


def test_what_a_minus_one_turns_on_is_refused_once_it_is_known():
    config = load_config(None, ["parallel.pipeline=-1", "adapters.rules=[{path: q_proj}]"])
    resolved = config.model_copy(update={"parallel": config.parallel.resolve(2)})
    assert any("adapters do not support a pipeline" in problem for problem in resolved.layout_problems())


def test_an_object_made_without_a_configuration_refuses_with_the_same_reason():
    workers = next(feature for feature in FEATURES if feature.name == "workers")
    workers.refuse(["dropout"], "set parallel.workers=1")
    with pytest.raises(ConfigError, match=r"workers .* pipeline, because .*; set parallel\.workers=1\."):
        workers.refuse(["dropout", "pipeline"], "set parallel.workers=1")


def test_the_page_shows_the_declarations():
    (page,) = PAGES
    text = page.read()
    assert page.make(text) == text, "run: python -m scripts.pages combinations"
