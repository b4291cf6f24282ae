"""Reinforcement learning as the task of a run: prompts, rewards, a trainer that samples, evaluations by rewards."""

import contextlib
import functools
import shlex
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from jaxstack.data.prompts import open_prompts
from jaxstack.errors import ConfigError
from jaxstack.loss import Batch
from jaxstack.module_arrays.module import Dict
from jaxstack.parallel.sharding_context import ShardingContext
from jaxstack.reinforce.environment import Description, Environment
from jaxstack.reinforce.exact import exact_options, inexact_part
from jaxstack.reinforce.policy import LOSSES, TEACHER, PolicyConfig, token_log_probabilities
from jaxstack.reinforce.rewards import Rewards, check_columns
from jaxstack.reinforce.rollout import Rollouts
from jaxstack.reinforce.sampler import Sampler, SamplerSize
from jaxstack.run.build import make_trainer
from jaxstack.run.load import load_reward_model
from jaxstack.run.train import Task, TrainedRun, print_line, train
from jaxstack.run_config import RunConfig
from jaxstack.step import Metrics
from jaxstack.stored import StoredModel
from jaxstack.stored.packed_base import PackedModel
from jaxstack.trainer import Trainer
from pallas_kernels.batch_invariant.attention import kernel_problem


def reinforce(
    config: RunConfig | str | Path, overrides: Sequence[str] = (), *, report: Callable[[str], None] = print_line
) -> TrainedRun:
    """Train a run on the rewards of answers that it samples, or resume it from its newest checkpoint.

    Args:
      config: the run's configuration, from `load_config`, or the YAML file that holds it.
      overrides: `section.key=value` for the values of a file to replace.
      report: called with each line of progress, unless `observe.progress` is off.

    Returns:
      The run with the values that were logged last, such as `reward` and `eval_reward`.

    Raises:
      ConfigError: the configuration cannot run here.
      JaxstackError: the run failed, or was stopped by a signal after saving.
    """
    return train(config, overrides, report=report, task=ReinforcementTask())


class ReinforcementTask(Task):
    """Prompts that the model answers, and the rewards of the answers."""

    def __init__(self) -> None:
        super().__init__()
        self._rewards: Rewards | None = None
        self._environment: Environment | None = None

    def check(self, config: RunConfig) -> None:
        """Check settings that need neither devices nor data.

        Raises:
          ConfigError: a loss, a reward or prompts are missing, or a setting does not go with them.
        """
        policy = config.policy
        if policy.loss is None and config.preference.loss is not None:
            raise ConfigError(
                f"preference.loss ({config.preference.loss}) trains on pairs of answers that the data has: "
                "run python -m jaxstack.train, or remove it and set policy.loss."
            )
        if policy.loss is None:
            raise ConfigError(f"jaxstack.reinforce needs a loss; set policy.loss to {', '.join(LOSSES)}.")
        if not config.data.prompts:
            raise ConfigError(
                "jaxstack.reinforce answers prompts; give sources of them, data.sources=[{path: FILE, format: prompt}]."
            )
        if not config.reward and policy.baseline != TEACHER:
            raise ConfigError("jaxstack.reinforce needs a reward, such as reward=[{name: exact}].")
        if policy.computes_reference and policy.reference == "init_from" and config.run.init_from is None:
            raise ConfigError(
                f"policy.kl ({policy.kl}) compares with the model that the run starts from; set run.init_from to it, "
                "or policy.reference to another model's directory."
            )
        if policy.baseline == TEACHER and policy.reference == "init_from":
            raise ConfigError(
                f"policy.loss {policy.loss} learns from a teacher; set policy.reference to the teacher's directory."
            )
        if any(rule.dropout for rule in config.adapters.rules):
            raise ConfigError("policy.loss does not support dropout; set the dropout of all adapters.rules to 0.")
        for name, value in (
            ("train.z_loss", config.train.z_loss),
            ("train.eval_tokens", config.train.eval_tokens),
            ("resilience.spike_threshold", config.resilience.spike_threshold),  # losses are near 0
        ):
            if value:
                raise ConfigError(f"policy.loss does not support {name} ({value}); remove it.")
        if _room(config) < 1:
            raise ConfigError(
                f"train.sequence_length ({config.train.sequence_length}) must exceed rollout.max_tokens "
                f"({config.rollout.max_tokens}), to leave room for the prompt."
            )

    def open(self, config: RunConfig, say: Callable[[str], None]) -> Rollouts:
        """Open the environment, the prompts and the rewards.

        Raises:
          ConfigError: the processes do not divide the prompts, prompts or rewards cannot be read, the environment
            cannot be used, or the chat template cannot write its tools and turns.
        """
        processes = jax.process_count()
        for name in ("prompts", "carried_prompts"):
            value = getattr(config.rollout, name)
            if value % processes:
                raise ConfigError(
                    f"rollout.{name} ({value}) must be divisible by the {processes} processes, each of which answers "
                    f"its share of them; nearest: {value // processes * processes + processes}."
                )
        environment = config.rollout.environment
        self._environment = Environment(environment) if environment.path else None
        known = Description() if self._environment is None else self._environment.description
        if not known.steps and any(reward.kind == "environment" for reward in config.reward):
            raise ConfigError(
                "reward environment is the sum of what the environment's step returns; name a class with step in "
                "rollout.environment.path, or remove that reward."
            )
        prompts = open_prompts(
            config.data, _room(config), config.run.seed, _stop_tokens(config), say, known.tools, texts=known.steps
        )
        check_columns(config.reward, prompts.columns(), config.data.sources[0].path)
        self._rewards = Rewards(config.reward, load_reward_model)
        return Rollouts(
            prompts,
            self._rewards,
            config.policy,
            config.rollout,
            config.train.sequence_length,
            config.run.seed,
            say,
            self._environment,
            config.directory,
        )

    def make_trainer(self, config: RunConfig, data: Rollouts, base: PackedModel | None) -> Trainer:
        """Make the trainer, and the sampler that uses its weights."""
        if config.rollout.engine.exact:
            config = _exact_config(config)
        trainer = make_trainer(config, data, kind=PolicyTrainer, base=base)
        trainer.policy = config.policy
        trainer.steps_together = config.policy.updates
        trainer.temperature = config.rollout.temperature
        trainer.longest_answer = config.rollout.max_tokens
        trainer.exact = config.rollout.engine.exact
        longest = data.prompts.longest
        if config.rollout.environment.path:  # further turns find full pages in the cache
            longest = max(longest, config.rollout.engine.page_size + 1)
        size = SamplerSize(
            prompts=data.asked // config.policy.samples,
            answers=data.asked,
            requests=data.largest,
            longest=longest,
            context=config.train.sequence_length,
        )
        sampler = Sampler(
            trainer,
            config.rollout.engine,
            size,
            vocab_size=data.vocab_size,
            stop_tokens=data.prompts.stop_tokens,
            records_experts=config.policy.router_replay,
            borrow=data.devices.borrow,
        )
        data.attach(
            sampler,
            lambda: trainer.state,
            shards=trainer.rules.degree(trainer.rules.table["batch"]),
            microbatches=config.train.gradient_accumulation,
        )
        return trainer

    def settings(self, config: RunConfig, data: Rollouts) -> dict[str, Any]:
        """Return further fields of `LoopSettings`."""
        return {"evaluate_first": True}

    def summarize(self, config: RunConfig, values: Mapping[str, float], say: Callable[[str], None]) -> None:
        """Report the command that generates text."""
        chat = "" if config.data.chat.template == "none" else "--chat "
        say(f'next: python -m jaxstack.generate --run {shlex.quote(str(config.directory))} {chat}--prompt "..."')

    def close(self) -> None:
        """End the processes of the rewards and of the environment."""
        for opened in (self._rewards, self._environment):
            if opened is not None:
                opened.close()


class PolicyTrainer(Trainer):
    """Trains a model on answers that it samples itself, with `policy_loss`. Its data are `Rollouts`.

    With several updates answers are trained on in as many steps, whose ratios compare with the probabilities before the
    first. Those for later steps may be sampled while a step runs, see `jaxstack.reinforce.ahead`.
    """

    waits = True
    policy = PolicyConfig()
    temperature = 1.0
    """Temperature at which answers are sampled."""
    longest_answer: int | None = None
    """Largest number of tokens of an answer; None: unknown."""
    exact = False
    """True: log-probabilities have the bits of the sampler's, see `jaxstack.reinforce.exact`."""

    @property
    def rollouts(self) -> Rollouts:
        """The data."""
        return cast(Rollouts, self.data)

    def batches(self, start: int) -> Generator[tuple[dict[str, jax.Array], float], None, None]:
        """Yield (batch on the devices, 0.0) for each step from `start` on, without reading ahead."""
        size = self.train.global_batch_size
        updates = self.policy.updates
        old: jax.Array | None = None
        host = self.rollouts.batches(global_batch_size=size, rows=range(size), start=start)
        with contextlib.closing(host):
            for step, rollout in enumerate(host, start):
                batch = self.put(rollout)
                if updates > 1:
                    if old is None or step % updates == 0:
                        old = self._log_probabilities(self.state.params, self.state.non_params, batch)
                    batch["old_logprobs"] = old
                yield batch, 0.0

    @property
    def data_state(self) -> Mapping[str, np.ndarray]:
        """The answers that were sampled for later steps, see `Rollouts.saved`."""
        return self.rollouts.saved

    @data_state.setter
    def data_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.rollouts.saved = arrays

    def train_step(self, batch: Mapping[str, jax.Array]) -> Metrics:
        """Take a step, and wait for it: later answers need its weights. Its metrics have those of the rollout."""
        began = time.perf_counter()
        metrics = super().train_step(batch)
        with self.rollouts.devices.lend():
            metrics = jax.block_until_ready(metrics)
        rollout = self.rollouts.current
        known = {} if rollout is None else rollout.metrics
        return {**metrics, **cast(Metrics, {**known, "train_seconds": time.perf_counter() - began})}

    def evaluate(
        self, max_tokens: int | None = None, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Return the rewards of answers to the held-out prompts, see `Rollouts.evaluate`."""
        del max_tokens
        return None if stop() else self.rollouts.evaluate()

    @functools.cached_property
    def _log_probabilities(self) -> Callable[[Dict, Dict, Batch], jax.Array]:
        """Compiled function (parameters, other variables, batch) -> log-probability of each label, [B, T] float32."""
        context = ShardingContext(self.steps.inner_rules, self.steps.layout)

        def compute(params: Dict, non_params: Dict, batch: Batch) -> jax.Array:
            with context.entered():
                model = self.module.used.merge(self.module.load(params), non_params)
                length = self.longest_answer
                return token_log_probabilities(model, batch, self.temperature, length, exact=self.exact)[0]

        shape = (self.train.global_batch_size, self.train.sequence_length)
        sharding = self.rules.sharding(self.rules.batch_spec(shape, "old_logprobs"))
        options = exact_options() if self.exact else None
        compiled = jax.jit(compute, out_shardings=sharding, compiler_options=options)

        def call(params: Dict, non_params: Dict, batch: Batch) -> jax.Array:
            with jax.set_mesh(self.rules.mesh):
                return compiled(params, non_params, batch)

        return call


def _exact_config(config: RunConfig) -> RunConfig:
    """Return the configuration with the XLA options of exact rollouts.

    Raises:
      ConfigError: a setting is not exact.
    """
    found = {
        "rollout.packing": config.rollout.packing,
        "adapters.rules": config.adapters.rules,
        f"{jax.process_count()} processes": jax.process_count() > 1,
        f"{jax.local_device_count()} devices in a process": jax.local_device_count() > 1,
    }
    problem = next((name for name, wrong in found.items() if wrong), None) or inexact_part(config.model)
    if problem is not None:
        raise ConfigError(
            f"rollout.engine.exact does not support {problem}: sampler and trainer would compute it in different "
            "orders. Remove one of them; policy.sampler_correction weights what differs."
        )
    dtype = config.precision.compute_dtype(jax.default_backend())
    if reason := kernel_problem(config.model.width_per_head, dtype):
        raise ConfigError(
            f"rollout.engine.exact computes attention by a kernel that {reason}. Set precision.compute=bfloat16 and "
            "take a model with such heads, or set exact=false; policy.sampler_correction weights what differs."
        )
    options = {**config.train.xla_options, **exact_options()}
    return config.model_copy(update={"train": config.train.model_copy(update={"xla_options": options})})


def _room(config: RunConfig) -> int:
    """Return the largest number of tokens of a prompt."""
    return config.train.sequence_length - config.rollout.max_tokens


def _stop_tokens(config: RunConfig) -> frozenset[int]:
    """Return the ids that end a text of the model that the run starts from; a resumed run has a copy of them."""
    for directory in (config.run.init_from, config.run.branch_from, str(config.directory)):
        stored = None if directory is None else StoredModel.find(Path(directory))
        if stored is not None:
            return frozenset(stored.stop_tokens)
    return frozenset()
