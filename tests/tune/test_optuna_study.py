"""Studies in storage: proposals that repeat, infeasible trials, pruning, and a study of another configuration."""

import math

import pytest

from jaxstack.errors import ConfigError
from jaxstack.tune import optuna_study
from jaxstack.tune.optuna_study import Outcome, best_of
from tests.tune.studies import SPACE, bowl, complete, open_study


def test_a_reopened_study_proposes_what_an_uninterrupted_one_does(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    whole = complete(open_study(tmp_path / "a", startup_trials=3), 6)
    parts = complete(open_study(tmp_path / "b", startup_trials=3), 4)
    parts += complete(open_study(tmp_path / "b", startup_trials=3), 2)
    assert parts == whole
    assert all(0 <= values["schedule.warmup_steps"] <= 20 for values in whole)
    assert all(1e-4 <= values["optimizer.learning_rate"] <= 1e-1 for values in whole)


def test_running_trials_of_several_workers_differ(tmp_path):
    study = open_study(tmp_path, startup_trials=2)
    complete(study, 3)
    asked = [study.ask()[1] for _ in range(3)]
    assert len({values["optimizer.learning_rate"] for values in asked}) == 3
    assert study.running() == [3, 4, 5] and study.started() == 6


def test_the_first_trial_is_the_configuration_itself(tmp_path):
    study = open_study(tmp_path, base_first=True)
    assert study.ask()[1] == {
        "optimizer.learning_rate": 3e-4,
        "schedule.warmup_steps": 0,
        "model.norm": "rms_norm",
    }


def test_the_best_trial_is_the_smallest_feasible_one(tmp_path):
    study = open_study(tmp_path)
    for outcome in (
        Outcome("complete", 3.0),
        Outcome("memory", None, 0.2, "does not fit"),
        Outcome("complete", 2.0),
        Outcome("failed", reason="not finite"),
        Outcome("configuration", reason="heads"),
    ):
        study.tell(study.ask()[0], outcome)
    records = study.records()
    assert [record.state for record in records] == ["complete", "memory", "complete", "failed", "configuration"]
    assert [record.value for record in records] == [3.0, None, 2.0, None, None]
    best = best_of(records)
    assert best is not None and best.number == 2
    assert records[1].reason == "does not fit"
    stored = {trial.number: (trial.value, dict(trial.constraints)) for trial in study._trials()}
    assert stored[1] == (3.0, {"memory": 0.2, "failure": -1.0}), (
        "the worst loss so far, and by how much it is too large"
    )
    assert stored[3][1] == {"memory": -1.0, "failure": 1.0}
    assert best_of([]) is None


def test_the_search_avoids_what_does_not_fit(tmp_path):
    """Rates above 0.001 do not fit, two thirds of the space, and the loss falls towards this edge."""
    study = open_study(tmp_path, startup_trials=8)
    failed = []
    for _ in range(32):
        number, values = study.ask()
        excess = math.log10(values["optimizer.learning_rate"] / 0.001)
        outcome = Outcome("memory", None, excess) if excess > 0 else Outcome("complete", bowl(values))
        study.tell(number, outcome)
        failed.append(excess > 0)
    best = best_of(study.records())
    assert best is not None and best.value is not None and best.value < 2.3
    assert sum(failed[8:]) <= 10, "of 24; at random 16"


def test_pruning_stops_trials_above_the_median_after_a_fifth_of_the_steps(tmp_path):
    study = open_study(tmp_path, pruner_startup_trials=2)
    for loss in (2.0, 3.0):
        number, _ = study.ask()
        assert not any(study.report(number, step, loss) for step in (2, 10, 20))
        study.tell(number, Outcome("complete", loss))
    number, _ = study.ask()
    assert not study.report(number, 2, 9.0), "in the first fifth nothing is stopped"
    assert study.report(number, 10, 2.6)
    study.tell(number, Outcome("pruned"))
    number, _ = study.ask()
    assert not study.report(number, 10, 2.4)
    assert study.report(number, 11, math.nan), "a loss that is not finite ends a trial at once"
    assert study.records()[2].curve == ((2, 9.0), (10, 2.6)) and study.records()[2].state == "pruned"


@pytest.mark.longer
def test_importance_names_the_key_that_matters(tmp_path):
    study = open_study(tmp_path, sampler="random")
    complete(study, 30)
    found = study.importance()
    assert max(found, key=lambda key: found[key]) == "optimizer.learning_rate"
    assert math.isclose(sum(found.values()), 1.0) and found.keys() == SPACE.keys()


def test_a_study_of_another_configuration_is_refused(tmp_path):
    open_study(tmp_path, identity={"train": {"steps": 20}})
    open_study(tmp_path, identity={"train": {"steps": 20}})
    with pytest.raises(ConfigError, match="another configuration: train.steps was 20, is 30"):
        open_study(tmp_path, identity={"train": {"steps": 30}})


def test_a_storage_that_cannot_be_opened_is_one_message(tmp_path):
    for place in ("nowhere://x", "/proc/x/study.journal"):
        with pytest.raises(ConfigError, match="cannot open the study's storage"):
            open_study(tmp_path, storage=place)


def test_a_damaged_journal_is_one_message(tmp_path):
    complete(open_study(tmp_path), 1)
    journal = tmp_path / "study.journal"
    journal.write_text("damaged\n" + journal.read_text())
    with pytest.raises(ConfigError, match="study.journal is damaged or no journal of Optuna; move it away"):
        open_study(tmp_path)


@pytest.mark.longer
def test_a_database_is_shared_storage(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    complete(open_study(tmp_path, storage=url), 2)
    assert open_study(tmp_path, storage=url).started() == 2


def test_gaussian_processes_need_torch(tmp_path, monkeypatch):
    config = open_study(tmp_path).config.model_copy(update={"sampler": "gp"})
    monkeypatch.setattr(optuna_study.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="gp needs torch and scipy"):
        optuna_study.check_packages(config)


def test_gaussian_processes_propose_with_infeasible_trials(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("scipy")
    study = open_study(tmp_path, sampler="gp", startup_trials=3)
    complete(study, 3)
    study.tell(study.ask()[0], Outcome("memory", None, 0.3))
    number, _ = study.ask()
    study.tell(number, Outcome("pruned"))
    assert complete(study, 2)
