"""An LSTM that controls a batch crystalliser, learned in hindsight from random cooling profiles.

Whatever size the crystals reached, the jacket temperatures of that batch were the right ones for it: with that size as
the set-point, they are labels. The network sees noisy measurements, its last actions and the error so far. Then it runs
itself, its runs are labelled in the same way, and it trains on.

python docs/examples/fields/process_control.py
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxstack import Trainer
from jaxstack.optim.optimizers import AdamW
from jaxstack.optim.schedules import Cosine
from jaxstack.run_config import TrainConfig
from jaxstack.trainer import numpy_batches

ACTIONS, MINUTES, SUBSTEPS, BATCH = 32, 3.0, 8, 128
JACKET, COLDEST, HOTTEST, CHANGE = 45.0, 10.0, 50.0, 4.0
"""Jacket temperature at the start, its range, and its largest change per action, in degrees Celsius."""
SCALES = np.array([100.0, 0.5, 50.0], np.float32)
"""Typical mean size (micrometres), concentration (kg / kg) and temperature (degrees Celsius)."""
Policy = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Function of time, measurements [B, 32, 3], jacket temperatures so far [B, 33] and set-points [B] -> jacket [B]."""


def advance(state: np.ndarray, jacket: np.ndarray) -> np.ndarray:
    """Advance batches [B, 6] by one action: moments 0 to 3 of the crystal sizes, concentration, temperature."""
    for _ in range(SUBSTEPS):
        m0, m1, m2, m3, solute, temperature = state.T
        solubility = 0.35 + 0.008 * (temperature - 25) + 6e-5 * (temperature - 25) ** 2
        excess = np.maximum(solute / solubility - 1, 0)
        growth, birth, heating = 60 * excess**1.2, 2e-8 * excess**2 * m3, 0.12 * (jacket - temperature)
        rates = (birth, growth * m0, 2 * growth * m1, 3 * growth * m2, -3 * 8e-9 * growth * m2, heating)
        state = state + MINUTES / SUBSTEPS * np.stack(rates, -1)
    return state


def starts(count: int, random: np.random.Generator) -> np.ndarray:
    """Return seeded batches [B, 6]; the seeds' size varies by 5 %, their number by 10 %, the concentration by 2 %."""
    size, amount = 60 * random.uniform(0.95, 1.05, count), 4 * random.uniform(0.9, 1.1, count)
    moments = [amount * size**i * np.exp(0.02 * i**2) for i in range(4)]
    solute = (0.35 + 0.008 * 20 + 6e-5 * 20**2) * random.uniform(1.0, 1.02, count)
    return np.stack([*moments, solute, np.full(count, JACKET)], -1)


def run(policy: Policy, state: np.ndarray, goal: np.ndarray, noise: Any, random: np.random.Generator) -> dict[str, Any]:
    """Run batches under a policy; return measurements [B, 32, 3], jacket temperatures [B, 33] and final sizes [B]."""
    measured, jackets = np.zeros((len(state), ACTIONS, 3), np.float32), np.full((len(state), ACTIONS + 1), JACKET)
    for k in range(ACTIONS):
        exact = np.stack([state[:, 1] / state[:, 0], state[:, 4], state[:, 5]], -1)
        measured[:, k] = exact * (1 + np.reshape(noise, (-1, 1)) * random.normal(size=exact.shape))
        wanted = policy(k, measured, jackets, goal)
        limited = np.clip(wanted, jackets[:, k] - CHANGE, jackets[:, k] + CHANGE)
        jackets[:, k + 1] = np.clip(limited, COLDEST, HOTTEST)
        state = advance(state, jackets[:, k + 1])
    return {"measured": measured, "jackets": jackets.astype(np.float32), "final": (state[:, 1] / state[:, 0])}


def random_profiles(count: int, random: np.random.Generator) -> np.ndarray:
    """Return jacket temperatures [B, 33]: two cooling rates, the second from a random time on, and small deviations."""
    time = np.arange(ACTIONS + 1)[None]
    switch = random.integers(4, 29, (count, 1))
    slopes = random.uniform(-0.2, 1.4, (2, count, 1))
    cooling = slopes[0] * np.minimum(time, switch) + slopes[1] * np.maximum(time - switch, 0)
    return np.clip(JACKET - cooling + random.normal(scale=0.3, size=(count, ACTIONS + 1)), COLDEST, HOTTEST)


def inputs(measured: Any, jackets: Any, goal: Any) -> Any:
    """Return what the controller sees, [B, 32, 7]."""
    left = np.broadcast_to((ACTIONS - np.arange(ACTIONS, dtype=np.float32)) / ACTIONS, measured.shape[:2])
    error = (goal[:, None] - measured[..., 0]) / SCALES[0]
    parts = (jackets[:, :ACTIONS, None] / SCALES[2], error[..., None], (error / left)[..., None], left[..., None])
    return np.concatenate([measured / SCALES, *parts], -1).astype(np.float32)


class Recurrent(nnx.Module):
    """LSTM (64), then a dense layer (64) and the output, over a series [B, T, inputs] -> [B, T, outputs]."""

    def __init__(self, width: int, outputs: int, rngs: nnx.Rngs):
        self.gates = nnx.Linear(width + 64, 4 * 64, rngs=rngs)
        self.dense, self.out = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, outputs, rngs=rngs)

    def step(self, carry: Any, x: jax.Array) -> Any:
        """Take one step on inputs [B, inputs]; return (the next carry, outputs [B, outputs])."""
        hidden, cell = carry
        keep, add, value, show = jnp.split(self.gates(jnp.concatenate([x, hidden], -1)), 4, -1)
        cell = nnx.sigmoid(keep + 1) * cell + nnx.sigmoid(add) * jnp.tanh(value)
        hidden = nnx.sigmoid(show) * jnp.tanh(cell)
        return (hidden, cell), self.out(jnp.tanh(self.dense(hidden)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.moveaxis(jax.lax.scan(self.step, (jnp.zeros((len(x), 64)),) * 2, jnp.moveaxis(x, 1, 0))[1], 0, 1)


def train(module: Any, rows: dict[str, np.ndarray], steps: int, rate: float, seed: int) -> Any:
    """Return the module, trained on the mean squared error."""
    trainer = Trainer(
        module, lambda model, batch: jnp.mean((model(batch["inputs"]) - batch["targets"]) ** 2),
        numpy_batches(rows, BATCH, seed),
        optimizer=AdamW(learning_rate=rate, weight_decay=0.0), schedule=Cosine(final_fraction=0.05),
        train=TrainConfig(steps=steps, global_batch_size=BATCH), seed=seed,
    )  # fmt: skip
    trainer.fit()
    return trainer.trained_module


def label(runs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return training rows in hindsight: the set-point is the size reached, the target the action taken."""
    seen = inputs(runs["measured"], runs["jackets"], runs["final"])
    return {"inputs": seen, "targets": np.diff(runs["jackets"], axis=1)[..., None]}


def lstm_policy(model: Any) -> Policy:
    """Return the LSTM controller as a policy."""
    change = nnx.jit(lambda model, x: model(x)[..., 0])
    return lambda k, seen, jackets, goal: jackets[:, k] + np.asarray(change(model, inputs(seen, jackets, goal)))[:, k]


def model_rows(runs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return rows that teach a model of the plant: measurements and next jacket -> change of the measurements."""
    seen = runs["measured"] / SCALES
    rows = np.concatenate([seen, runs["jackets"][:, 1:, None] / SCALES[2]], -1)[:, :-1].astype(np.float32)
    return {"inputs": rows, "targets": 20 * np.diff(seen, axis=1).astype(np.float32)}


def predictive_policy(model: Any, rates: np.ndarray) -> Policy:
    """Return model predictive control: the ramp whose predicted final size is closest to the set-point."""

    @nnx.jit
    def choose(model: Any, seen: jax.Array, jackets: jax.Array, k: jax.Array, goal: jax.Array) -> jax.Array:
        def follow(carry: Any, time: jax.Array) -> Any:
            memory, now, jacket = carry
            now = jnp.where(time <= k, seen[:, None, time], now)
            planned = jnp.clip(jacket + rates, COLDEST, HOTTEST)
            jacket = jnp.where(time < k, jackets[:, None, time + 1], planned)
            x = jnp.concatenate([now, jacket[..., None] / SCALES[2]], -1)
            memory, change = model.step(memory, x.reshape(-1, 4))
            return (memory, now + change.reshape(now.shape) / 20, jacket), None

        shape = (len(seen), len(rates))
        start = (jnp.zeros((len(seen) * len(rates), 64)),) * 2, jnp.zeros((*shape, 3)), jnp.full(shape, JACKET)
        (_, final, _), _ = jax.lax.scan(follow, start, jnp.arange(ACTIONS))
        return jnp.asarray(rates)[jnp.argmin(jnp.abs(final[..., 0] - goal[:, None]), -1)]

    return lambda k, measured, jackets, goal: (
        jackets[:, k] + np.asarray(choose(model, measured / SCALES, jackets.astype(np.float32), k, goal / SCALES[0]))
    )


def pi_policy(proportional: float, integral: float) -> Policy:
    """Return a PI controller of the deviation from a straight line from the nominal seeds to the set-point."""

    def policy(k: int, measured: np.ndarray, jackets: np.ndarray, goal: np.ndarray) -> np.ndarray:
        line = 60 + (goal[:, None] - 60) * np.arange(k + 1) / ACTIONS
        error = line - measured[:, : k + 1, 0]
        return JACKET - 0.6 * (k + 1) - proportional * error[:, -1] - integral * error.sum(1)

    return policy


def profile_runs(count: int, noise: Any, random: np.random.Generator) -> tuple[np.ndarray, dict[str, Any]]:
    """Return (starts [B, 6], their runs under random profiles)."""
    state, profiles = starts(count, random), random_profiles(count, random)
    return state, run(lambda k, *_: profiles[:, k + 1], state, np.zeros(count), noise, random)


def learn_controller(first: dict[str, Any], steps: int, seed: int) -> Any:
    """Train on random profiles, then three times on these and the controller's own runs."""
    pool, random = [label(first)], np.random.default_rng(seed + 1)

    def explore(policy: Policy, offset: np.ndarray) -> Policy:
        return lambda k, *seen: policy(k, *seen) + offset + random.normal(scale=0.3, size=3000)

    controller = train(lambda rngs: Recurrent(7, 1, rngs), pool[0], steps, 5e-3, seed)
    for repeat in range(3):
        state, reached = profile_runs(3000, 0.0, random)
        policy = explore(lstm_policy(controller), random.normal(scale=0.3, size=3000))
        pool.append(label(run(policy, state, reached["final"], random.uniform(0, 0.12, 3000), random)))
        joined = {name: np.concatenate([rows[name] for rows in pool]) for name in pool[0]}
        controller = train(controller, joined, max(1, steps * 5 // 12), 2e-3, seed + repeat + 1)
    return controller


def deviation(policy: Policy, noise: float, seed: int) -> float:
    """Return the mean deviation from set-points in % on unseen starts, each of which can reach its set-point."""
    random = np.random.default_rng(seed + 1000)
    state, reached = profile_runs(256, 0.0, random)
    final = run(policy, state, reached["final"], noise, random)["final"]
    return 100 * float(np.mean(np.abs(final / reached["final"] - 1)))


def least_deviation(noise: float, seed: int, draws: int = 1500) -> float:
    """Return the mean deviation in % that remains if a run's start is known only as far as its measurements tell."""
    random = np.random.default_rng(seed + 1000)
    runs = profile_runs(64, 0.0, random)[1]
    seen = runs["measured"] * (1 + noise * random.normal(size=runs["measured"].shape))
    jackets, state = np.repeat(runs["jackets"], draws, 0), np.tile(starts(draws, random), (64, 1))
    found = run(lambda k, *_: jackets[:, k + 1], state, np.zeros(len(state)), 0.0, random)
    exact, final = found["measured"].reshape(64, draws, ACTIONS, 3), found["final"].reshape(64, draws)
    logarithms = -np.sum(((seen[:, None] / exact - 1) / noise) ** 2 / 2 + np.log(exact), (2, 3))
    likelihoods = np.exp(logarithms - logarithms.max(1, keepdims=True))
    expected = np.average(final, 1, likelihoods)[:, None]
    return 100 * float(np.mean(np.average(np.abs(final / expected - 1), 1, likelihoods)))


def main(steps: int = 1200, seed: int = 0) -> dict[str, Any]:
    """Train the controller and the models for predictive control; run them, and PI, on unseen starts."""
    random, rates = np.random.default_rng(seed), np.linspace(-3, 1, 17, dtype=np.float32)
    noisy = profile_runs(6000, random.uniform(0, 0.12, 6000), random)[1]
    clean = profile_runs(6000, 0.0, random)[1]
    plants = [train(lambda rngs: Recurrent(4, 3, rngs), model_rows(runs), steps, 5e-3, seed) for runs in (clean, noisy)]
    gains = [(p, i) for p in (0.03, 0.1, 0.2, 0.4) for i in (0.0, 0.01, 0.03, 0.1)]
    best = min(gains, key=lambda pair: deviation(pi_policy(*pair), 0.05, seed + 1))
    policies = {"LSTMc": lstm_policy(learn_controller(noisy, 4 * steps, seed)),
                "LSTM-MPC": predictive_policy(plants[0], rates),
                "LSTM-MPC with a model trained on noise": predictive_policy(plants[1], rates),
                "PI": pi_policy(*best)}  # fmt: skip
    curves = {name: [(100 * noise, deviation(policy, noise, seed)) for noise in (0.0, 0.05, 0.1)]
              for name, policy in policies.items()}  # fmt: skip
    ours, baseline, least = dict(curves["LSTMc"]), dict(curves["LSTM-MPC"]), least_deviation(0.1, seed)
    return {
        "claim": "An LSTM controller stays within 2 % of the set-point, three times closer than LSTM-MPC under noise.",
        "paper": "arXiv:2306.07510",
        "measure": "mean deviation of the final size at 10 % noise, %; baseline: LSTM-MPC",
        "ours": ours[10.0], "baseline": baseline[10.0], "published": 2.0,
        "checks": {
            "deviation without noise at most 2 %": ours[0.0] <= 2,
            "deviation at 10 % noise at most 2 %": ours[10.0] <= 2,
            "at 10 % noise at least 3 times below LSTM-MPC": ours[10.0] <= baseline[10.0] / 3,
        },
        "numbers": {f"{name}, deviation in % at {noise:g} % noise": value
                    for name, curve in curves.items() for noise, value in curve if noise in (0.0, 10.0)},
        "bound": f"at 10 % noise the measurements leave {least:.2f} % of deviation to a controller that knows the "
                 f"plant exactly, {baseline[10.0] / least:.1f} times below LSTM-MPC",
        "picture": [{"title": "Mean deviation from the set-point, %", "x_label": "noise of the sensors, %",
                     "curves": curves}],
    }  # fmt: skip


if __name__ == "__main__":
    for name, value in main().items():
        if name != "picture":
            print(f"{name}: {value}")
