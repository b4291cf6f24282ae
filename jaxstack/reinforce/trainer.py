"""The trainer of reinforcement learning: samples answers between its steps, and evaluates by their rewards."""

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Mapping
from typing import cast

import jax
import numpy as np

from jaxstack.loss import Batch
from jaxstack.module_arrays.module import Dict
from jaxstack.parallel.sharding_context import ShardingContext
from jaxstack.reinforce.exact import exact_options
from jaxstack.reinforce.policy import PolicyConfig, token_log_probabilities
from jaxstack.reinforce.rollout import Rollouts
from jaxstack.step import Metrics
from jaxstack.trainer import Trainer


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

        size, length = self.train.global_batch_size, self.train.sequence_length
        sharding = self.rules.sharding(self.rules.batch_spec((size, length), "old_logprobs"))
        options = exact_options() if self.exact else None
        compiled = jax.jit(compute, out_shardings=sharding, compiler_options=options)

        def call(params: Dict, non_params: Dict, batch: Batch) -> jax.Array:
            with jax.set_mesh(self.rules.mesh):
                return compiled(params, non_params, batch)

        return call
