"""The report page of a study, from records."""

import re

from jaxstack.tune.optuna_study import TrialRecord
from jaxstack.tune.report import write_report
from jaxstack.tune.space import StudyConfig, read_space
from tests.tune.studies import SPACE, write_config


def record(number, state, value, norm="rms_norm", reason=""):
    values = {"optimizer.learning_rate": 10.0 ** -(1 + number % 3), "schedule.warmup_steps": 5, "model.norm": norm}
    curve = ((5, 4.0 + number), (10, 3.0 + number)) if state in ("complete", "pruned") else ()
    return TrialRecord(number, state, values, value, curve, reason, 61.0)


def test_the_page_shows_trials_values_importance_and_the_best_yaml(tmp_path):
    space = read_space(SPACE, write_config(tmp_path), [], "s.yaml")
    records = [
        record(0, "complete", 3.5),
        record(1, "complete", 2.25, "layer_norm"),
        record(2, "pruned", None),
        record(3, "memory", None, reason="does not <fit>"),
        record(4, "running", None),
    ]
    importance = {"optimizer.learning_rate": 0.75, "model.norm": 0.25}
    config = StudyConfig.model_validate({"name": "my-study", "space": SPACE})
    page = write_report(tmp_path, config, records, importance, space, "optimizer: {learning_rate: 0.01}\n").read_text()
    assert page.count("<figure") == 5, "best so far, curves, one for each key"
    assert "2.2500" in page and "eval_loss, trial 1" in page
    assert "does not &lt;fit&gt;" in page and "<fit>" not in page
    assert "optimizer: {learning_rate: 0.01}" in page and "75 %" in page
    curves = re.findall(r"<title>(trial [^<]*)</title>", page)
    assert curves == ["trial 0", "trial 2", "trial 1 (best)"]
    points = re.findall(r'<i class="(\w+)" title="trial (\d)', page)
    assert [p for p in points if p[1] == "1"] == [("second", "1")] * 3
    assert [p for p in points if p[1] == "2"] == [("faint", "2")] * 3


def test_a_study_without_trials_has_a_page(tmp_path):
    space = read_space(SPACE, write_config(tmp_path), [], "s.yaml")
    config = StudyConfig.model_validate({"name": "my-study", "space": SPACE})
    page = write_report(tmp_path, config, [], {}, space, "").read_text()
    assert "my-study" in page and "<figure" not in page
