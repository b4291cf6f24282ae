"""Reinforcement learning by the command: rewards that rise, metrics, exact resuming, adapters, and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxstack.reinforce.__main__ as command
import jaxstack.train as train_command
from jaxstack.reinforce.environment import Environment
from jaxstack.reinforce.task import reinforce
from jaxstack.run.load import load
from jaxstack.run_config import load_config
from tests.reinforce.conftest import metrics_of
from tests.word_models import FIXTURES

METRICS = {
    *("loss", "reward", "reward_std", "useful_groups", "answer_tokens", "truncated", "entropy", "clip_share", "kl"),
    *("sampler_logprob_difference", "rollout_seconds", "train_seconds"),
}


def test_wrong_configurations_are_one_message(folder, capsys):
    """The rule, the values and the way out; exit code 2, before the model is built."""
    cases = {
        "policy.samples=1": "policy: samples is 1, but advantage group_std compares the answers",
        "train.global_batch_size=6": "must be rollout.prompts (2) x policy.samples (4) = 8",
        "rollout.stale_steps=-1": "greater than or equal to 0",
        "rollout.resample=1 & rollout.carried_prompts=1": "rollout.resample (1) needs complete rollouts",
        "rollout.environment.path=[x.py:X] & rollout.carried_prompts=1": "rollout.carried_prompts (1) leaves",
        "rollout.packing=true": "set train.gradient_accumulation (1) to 2 or more, or rollout.packing to false",
        "rollout.resample=1 & policy.loss=ppo": "rollout.resample (1) replaces groups of equal rewards",
        "policy.router_replay=true": "policy.router_replay is for mixtures of experts",
        "rollout.engine.exact=true": "rollout.engine.exact does not support 8 devices in a process",
        "policy.updates=3": "train.steps (4) must be divisible by policy.updates (3)",
        "parallel.context=2": "policy.loss does not support parallel.context",
        "policy.loss=null": "jaxstack.reinforce needs a loss; set policy.loss to grpo, dr_grpo",
        "policy.loss=null & preference.loss=dpo": "preference.loss (dpo) trains on pairs of answers that the data has",
        "reward=[]": "jaxstack.reinforce needs a reward",
        "policy.loss=distill": "policy.loss distill learns from a teacher; set policy.reference to the teacher's",
        "data.sources.0.format=chat": "jaxstack.reinforce answers prompts",
        "rollout.max_tokens=16": "train.sequence_length (16) must exceed rollout.max_tokens (16)",
        "rollout.max_tokens=8": "prompts of",
        "reward=[{name: exact}]": "reward exact needs the column 'answer' in",
        "reward=[{name: environment}]": "reward environment is the sum of what the environment's step returns",
        "rollout.environment={path: [nothing]}": "path is module:function or file.py:function; found 'nothing'",
        f"rollout.environment={{path: ['{folder}/game.py:nothing']}}": "no function or class nothing; choose one of",
        f"rollout.environment={{path: ['{folder}/game.py:add']}} & data.chat.template={folder}/plain.jinja": (
            "the chat template does not write tool calls; give another template (data.chat.template)"
        ),
        f"rollout.environment={{path: ['{folder}/game.py:Game']}} & data.chat.template={folder}/forgets.jinja": (
            "the chat template leaves the reasoning out of an answer once messages of the user follow it"
        ),
    }
    for override, message in cases.items():
        assert command.main(["--config", str(folder / "grpo.yaml"), *override.split(" & ")]) == 2, override
        said = capsys.readouterr().err
        assert message in said and "Traceback" not in said, override
    assert train_command.main(["--config", str(folder / "grpo.yaml")]) == 2
    assert "run python -m jaxstack.reinforce" in capsys.readouterr().err


def weights_of(run: Path) -> dict[str, np.ndarray]:
    """The weights of a run's newest checkpoint by name."""
    leaves, _ = jax.tree.flatten_with_path(load(run).decoder.params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def trained(folder) -> dict:
    return dict(reinforce(load_config(folder / "grpo.yaml")).metrics)


@pytest.mark.longer
def test_a_run_logs_its_rewards(folder, trained):
    lines = metrics_of(folder / "grpo")
    steps = [line for line in lines if "reward" in line]
    assert len(steps) == 4 and all(line.keys() >= METRICS for line in steps)
    assert max(line["sampler_logprob_difference"] for line in steps) < 1e-4
    evaluations = [line for line in lines if "eval_reward" in line]
    assert [line["step"] for line in evaluations] == [0, 4] and all("eval_reward_greedy" in x for x in evaluations)


@pytest.mark.longer
def test_a_stopped_run_goes_on_exactly(folder, trained):
    reinforce(load_config(folder / "grpo.yaml", ["run.name=stopped", "train.steps=2"]))
    resumed = reinforce(load_config(folder / "grpo.yaml", ["run.name=stopped"])).metrics
    names = ["loss", "grad_norm", "reward", "answer_tokens", "eval_reward"]
    assert [resumed[name] for name in names] == [trained[name] for name in names]


def check_goes_on_exactly(folder: Path, more: list[str]) -> list[dict]:
    """Train, then again from the checkpoint of step 2: to the same metrics and weights, bit for bit.

    Returns the metrics of the steps.
    """
    run = folder / "cut_off"
    shutil.rmtree(run, ignore_errors=True)
    config = load_config(folder / "grpo.yaml", ["run.name=cut_off", *more])
    reinforce(config)
    lines, weights = metrics_of(run), weights_of(run)
    shutil.rmtree(run / "checkpoints" / "4")
    (run / "metrics.jsonl").unlink()
    reinforce(config)
    for name, array in weights_of(run).items():
        np.testing.assert_array_equal(array, weights[name], name)

    def values(lines: list[dict]) -> list[dict]:
        names = ("loss", "reward", "sampler_kl", "answer_tokens", "staleness", "staleness_largest", "eval_reward")
        return [{name: line.get(name) for name in names} for line in lines]

    again = metrics_of(run)
    assert [line["step"] for line in again] == [3, 4, 4] and values(again) == values(lines[-3:])
    return [line for line in lines if "reward" in line]


@pytest.mark.longer
@pytest.mark.parametrize(("stale", "updates"), [(1, 1), (3, 2)])
def test_sampling_ahead_is_reproducible(folder, stale, updates):
    """Steps that are sampled while others run have fixed weights, and a killed run goes on to the same ones."""
    lines = check_goes_on_exactly(folder, [f"rollout.stale_steps={stale}", f"policy.updates={updates}"])
    assert [line["staleness"] for line in lines] == [step - max(0, step - step % updates - stale) for step in range(4)]
    assert lines[0]["importance"] == pytest.approx(1, abs=1e-4) and abs(lines[3]["importance"] - 1) > 1e-4


@pytest.mark.longer
@pytest.mark.parametrize("stale", [0, 1])
def test_answers_are_left_to_the_next_rollout(folder, stale):
    """Prompts whose answers take long are trained on later; a killed run has their tokens so far."""
    lengths = ["rollout.max_tokens=12", "train.sequence_length=24", "rollout.engine.decode_steps=1"]
    more = [*lengths, "rollout.carried_prompts=2", f"rollout.stale_steps={stale}"]
    lines = check_goes_on_exactly(folder, more)
    assert lines[0]["carried_answers"] == 0 and lines[-1]["carried_answers"] > 0
    assert lines[-1]["staleness_largest"] > stale and lines[-1]["staleness"] > stale
    assert "importance" in lines[0], "answers of older weights are corrected"


@pytest.mark.longer
def test_training_follows_the_experts_of_the_sampler(folder):
    """Experts are those of the weights that sampled, also after a stop, and with answers in parts."""
    mixture = shutil.copytree(FIXTURES / "qwen3-moe", folder / "qwen3-moe")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "qwen3" / name, mixture / name)
    lengths = ["rollout.max_tokens=12", "train.sequence_length=24", "rollout.engine.decode_steps=1"]
    stale = ["rollout.carried_prompts=2", "rollout.stale_steps=1"]
    lines = check_goes_on_exactly(folder, [f"run.init_from={mixture}", "policy.router_replay=true", *lengths, *stale])
    assert lines[0]["router_changed"] == 0 < lines[-1]["router_changed"] < 0.5


@pytest.mark.longer
def test_several_updates_with_adapters_and_a_reference(folder):
    """The reference is the model without its adapters: the first step has no divergence from it, the second has."""
    adapters = "adapters.rules=[{path: attention, rank: 2}]"
    more = ["run.name=lora", adapters, "policy.loss=dapo", "policy.kl=0.1", "policy.updates=2", "train.steps=2"]
    reinforce(load_config(folder / "grpo.yaml", more))
    first, second = [line for line in metrics_of(folder / "lora") if "reward" in line]
    assert first["kl"] == 0 and second["kl"] > 0
    assert first["reward"] == second["reward"] and second["rollout_seconds"] == 0


@pytest.mark.longer
def test_a_teacher_judges_each_token(folder, trained):
    """Without any reward the model comes nearer to its teacher, on its own answers, of which the longest count too."""
    more = ["run.name=distilled", "policy.loss=distill", "policy.samples=1", "policy.overlong=null", "reward=[]"]
    teacher = f"policy.reference={folder / 'grpo'}"
    reinforce(load_config(folder / "grpo.yaml", [*more, teacher, "rollout.prompts=8", "train.steps=6"]))
    lines = [line for line in metrics_of(folder / "distilled") if "reward" in line]
    divergences = [line["kl"] for line in lines]
    assert divergences[0] > 0 and sum(divergences[-2:]) < 0.7 * sum(divergences[:2])
    assert all(line["truncated"] > 0 and line["reward"] == 0 for line in lines[:1])


@pytest.mark.longer
def test_groups_of_equal_rewards_are_replaced(folder, trained):
    """Each step samples further prompts as long as groups are missing, and goes on exactly after a stop."""
    more = [
        "policy.samples=2",
        "rollout.resample=3",
        "parallel={data: 2, fsdp: 2, tensor: 2}",
        "optimizer.learning_rate=1e-12",
    ]
    reinforce(load_config(folder / "grpo.yaml", ["run.name=resampled", *more]))
    plain = ["policy.samples=2", "parallel={data: 2, fsdp: 2, tensor: 2}", "optimizer.learning_rate=1e-12"]
    reinforce(load_config(folder / "grpo.yaml", ["run.name=sampled_once", *plain]))
    lines = [line for line in metrics_of(folder / "resampled") if "reward" in line]
    once = [line for line in metrics_of(folder / "sampled_once") if "reward" in line]
    assert any(line["rollouts"] > 1 for line in lines) and all(1 <= line["rollouts"] <= 4 for line in lines)
    for line, without in zip(lines, once, strict=True):
        assert (line["rollouts"] == 1) == (without["useful_groups"] == 1)
        assert line["rollouts"] > 1 or line["reward"] == without["reward"]
    reinforce(load_config(folder / "grpo.yaml", ["run.name=cut", *more, "train.steps=2"]))
    resumed = reinforce(load_config(folder / "grpo.yaml", ["run.name=cut", *more])).metrics
    assert [resumed[name] for name in ("reward", "rollouts")] == [lines[-1][name] for name in ("reward", "rollouts")]


@pytest.mark.longer
def test_packed_answers_give_the_same_steps(folder):
    """With half of the microbatches, and without a compilation for other lengths; the layout splits the rows."""
    more = ["rollout.prompts=8", "train.global_batch_size=32", "train.gradient_accumulation=4", "policy.loss=dapo"]
    more += ["train.sequence_length=32"]
    reinforce(load_config(folder / "grpo.yaml", ["run.name=padded", *more]))
    reinforce(load_config(folder / "grpo.yaml", ["run.name=packed", "rollout.packing=true", *more]))
    padded, packed = ([line for line in metrics_of(folder / name) if "reward" in line] for name in ("padded", "packed"))
    assert all(line["computed"] <= 0.75 for line in packed)
    for name in ("reward", "loss", "grad_norm", "entropy", "sampler_logprob_difference"):
        assert packed[0][name] == pytest.approx(padded[0][name], rel=1e-3, abs=1e-6), name


@pytest.mark.longer
@pytest.mark.parametrize("stale", [0, 1])
def test_a_killed_run_with_an_environment_goes_on_exactly(folder, monkeypatch, stale):
    """The weights, the random numbers of the environment's code and the samples are those of a run without a break."""
    more = [
        f"rollout.environment={{path: ['{folder}/game.py:Game'], turns: 3}}",
        "rollout.max_tokens=24",
        "train.sequence_length=40",
        "reward=[{name: environment}]",
        "policy.advantage=batch_std",
        f"rollout.stale_steps={stale}",
    ]
    names = [f"{name}{stale}" for name in ("turns", "killed")]
    whole = reinforce(load_config(folder / "grpo.yaml", [f"run.name={names[0]}", *more])).metrics
    lines = [line for line in metrics_of(folder / names[0]) if "reward" in line]
    assert all(1 < line["turns"] <= 3 and line["tool_calls"] == line["failed_calls"] == 0 for line in lines)
    assert stale or max(line["sampler_logprob_difference"] for line in lines) < 1e-4
    work = Environment.__call__
    calls = 0

    def end_in_the_middle(self, *given):
        nonlocal calls
        calls += 1
        if calls == 12 + 4 * stale:  # in the third or fourth rollout
            raise MemoryError("killed")
        return work(self, *given)

    monkeypatch.setattr(Environment, "__call__", end_in_the_middle)
    with pytest.raises(MemoryError):
        reinforce(load_config(folder / "grpo.yaml", [f"run.name={names[1]}", *more]))
    monkeypatch.undo()
    saved = folder / names[1] / "checkpoints"
    assert (saved / "2").is_dir() and not (saved / "4").exists()
    resumed = reinforce(load_config(folder / "grpo.yaml", [f"run.name={names[1]}", *more])).metrics
    values = ["loss", "grad_norm", "reward", "turns", "answer_tokens", "eval_reward", "eval_turns"]
    assert [resumed[name] for name in values] == [whole[name] for name in values]
    first, second = (load(folder / name).decoder.params for name in names)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    shown = [json.loads((folder / name / "samples.json").read_text()) for name in names]
    assert shown[0] == shown[1] and shown[0]["samples"][0]["messages"][1]["role"] == "user"
    assert "what" in (folder / names[0] / "report.html").read_text().split("Newest answers")[1]
