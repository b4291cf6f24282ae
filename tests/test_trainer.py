"""`Trainer` with a user's own modules, losses and optimizers; runs that are kept, broken off and taken up again."""

import dataclasses
import errno
import json
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jaxstack import Trainer
from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.loop import LoopSettings
from jaxstack.loss import LossSum
from jaxstack.module_arrays.linen import from_linen
from jaxstack.observe.config import ObserveConfig
from jaxstack.observe.run_log import RunLog
from jaxstack.observe.trackers import _WholeRecords
from jaxstack.optim.optimizers import SGD, AdamW
from jaxstack.optim.schedules import Constant
from jaxstack.parallel import ParallelConfig, StepLayout, make_mesh
from jaxstack.resilience.config import ResilienceConfig
from jaxstack.run_config import TrainConfig
from jaxstack.state import LATER_FIELDS
from jaxstack.trainer import numpy_batches
from tests.small_runs import batch_at, make_trainer, run_steps, small_config

CONTRACT_KEYS = {
    "step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "tokens_per_second_per_device",
    "step_time_seconds", "model_tflops_per_device", "mfu", "peak_memory_bytes", "data_wait_fraction",
}  # fmt: skip
RANDOM = np.random.default_rng(0)
POINTS = RANDOM.normal(size=(256, 8)).astype(np.float32)
ROWS = {"x": POINTS, "y": np.sin(POINTS @ RANDOM.normal(size=8)).astype(np.float32)}


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.down = nnx.Linear(32, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))[:, 0]


class LinenNetwork(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool = True):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(32)(x))
        return linen.Dense(1)(linen.relu(x))[:, 0]


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def settings(**checkpoint) -> LoopSettings:
    return LoopSettings(
        checkpoint=CheckpointConfig(**{"every_steps": 4, **checkpoint}),
        observe=ObserveConfig(log_every=1, trackers=("jsonl",), progress=False),
    )


def own_trainer(module=Network, steps: int = 10, batch: int = 16, loss=squares, **arguments) -> Trainer:
    arguments = {"optimizer": AdamW(learning_rate=0.02), "schedule": Constant(), **arguments}
    train = TrainConfig(steps=steps, global_batch_size=batch)
    return Trainer(module, loss, numpy_batches(ROWS, batch), train=train, **arguments)


def losses_of(run_dir) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_own_nnx_module_learns():
    trainer = own_trainer(steps=80)
    first = run_steps(trainer, 1)[0]
    values = trainer.fit()
    assert values["loss"] < 0.7 * first and values["step"] == 80
    means = trainer.state.non_params["norm"]["mean"]
    assert float(jnp.abs(means).max()) > 0, "running statistics are carried along"
    model = trainer.trained_module
    model.eval()
    assert model(ROWS["x"]).shape == (256,)


def test_a_module_built_beforehand_keeps_its_values():
    network = Network(nnx.Rngs(3))
    trainer = own_trainer(network)
    np.testing.assert_array_equal(trainer.state.params["up"]["kernel"], network.up.kernel[...])


def test_linen_module_with_batch_statistics_learns():
    """Flax's bridge takes the collections that a call may change as `mutable`."""

    def loss(model, batch):
        return jnp.mean((model(batch["x"], mutable=["batch_stats"]) - batch["y"]) ** 2)

    trainer = own_trainer(from_linen(LinenNetwork(), POINTS[:1]), steps=80, loss=loss)
    before = jax.device_get(_plain(trainer.state.non_params))
    first = run_steps(trainer, 1)[0]
    assert trainer.fit()["loss"] < 0.8 * first
    changed = jax.tree.map(
        lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b))), before, _plain(trainer.state.non_params)
    )
    assert any(jax.tree.leaves(changed))


def _plain(tree):
    return jax.tree.map(
        lambda x: x if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jax.random.key_data(x), tree
    )


def test_an_optax_transformation_is_taken_as_it_is():
    trainer = own_trainer(optimizer=optax.chain(optax.clip(1.0), optax.sgd(0.05, momentum=0.9)))
    start = jax.device_get(trainer.state.params)
    metrics = trainer.train_step(next(trainer.batches(0))[0])
    assert "learning_rate" not in metrics
    assert float(np.abs(trainer.state.params["up"]["kernel"] - start["up"]["kernel"]).max()) > 0


@pytest.mark.parametrize("degrees", [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_own_module_on_a_mesh_trains_as_on_one_device(degrees):
    def network(rngs):
        return nnx.Sequential(nnx.Linear(8, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 1, rngs=rngs), lambda x: x[:, 0])

    def run(mesh):
        return run_steps(own_trainer(network, mesh=mesh, optimizer=SGD(learning_rate=0.1)), 5)

    one = run(make_mesh(devices=jax.devices()[:1]))
    np.testing.assert_allclose(run(make_mesh(ParallelConfig(**degrees))), one, rtol=1e-5)


def test_a_state_is_created_while_the_step_is_traced_and_an_existing_one_is_kept():
    creating = []

    def make(rngs):
        creating.append(threading.current_thread())
        return Network(rngs)

    trainer = own_trainer(make)
    lazy = own_trainer()
    batch = trainer.peek_batch()
    creating.clear()
    trainer.compile(batch, create_state=True)
    assert set(creating) - {threading.main_thread()}
    creating.clear()
    created = trainer.state
    jax.tree.map(np.testing.assert_array_equal, created.params, lazy.state.params)
    trainer.compile(batch, create_state=True)
    assert trainer.state is created and not set(creating) - {threading.main_thread()}


def test_a_state_that_cannot_be_created_says_why():
    def explodes(rngs):
        if started:
            raise RuntimeError("no such weights")
        return Network(rngs)

    started = []
    trainer = own_trainer(explodes)
    batch = trainer.peek_batch()
    started.append(True)
    with pytest.raises(RuntimeError, match="no such weights"):
        trainer.compile(batch, create_state=True)


def test_an_iterable_is_skipped_forward_on_resuming(tmp_path):
    batches = [{"x": POINTS[i : i + 8], "y": ROWS["y"][i : i + 8]} for i in range(0, 80, 8)]

    def fit(steps, folder):
        train = TrainConfig(steps=steps, global_batch_size=8)
        trainer = Trainer(Network, squares, batches, train=train, optimizer=optax.sgd(0.1))
        return trainer.fit(tmp_path / folder, settings())

    whole = fit(10, "whole")
    fit(4, "broken")
    assert fit(10, "broken")["loss"] == whole["loss"]
    with pytest.raises(Exception, match="batch"):
        fit(11, "broken")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda step: {"x": POINTS[:3], "y": ROWS["y"][:3]}, r"global_batch_size \(16\)"),
        (lambda step: {"x": POINTS[:16], "y": ROWS["y"][:15]}, "one first dim"),
        (lambda step: [1, 2], "dict of arrays"),
        (lambda step: {"x": POINTS[:16], "name": np.array(["a"] * 16)}, "the array 'name' of a batch has dtype <U1"),
        ([], "batch"),
        (lambda step: {"x": POINTS[:16], "m": None}, "'m' is of type NoneType"),
        (
            lambda step: {"x": POINTS[:16], "y": {"z": POINTS[:16]}},
            "flat dict of arrays; its value 'y' is of type dict",
        ),
        (lambda step: {"x": POINTS[:16], "rate": 0.1}, "'rate': 'a scalar'"),
        (lambda step: {"x": POINTS[:16], "m": [[1]] * 15 + [[1, 2]]}, "the lists 'm' of a batch differ in length"),
        (lambda step: {"x": POINTS[:32], "y": ROWS["y"][:32]}, r"TrainConfig\(global_batch_size=32\)"),
        (
            lambda step: {"x": POINTS[:16], "y": ROWS["y"][:16], "id": np.arange(16) + 2**40},
            "the array 'id' of a batch holds 1099511627791, but integers on the devices are int32",
        ),
    ],
)
def test_wrong_batches_are_explained(data, said):
    trainer = Trainer(Network, squares, data, train=TrainConfig(steps=1, global_batch_size=16))
    with pytest.raises(JaxstackError, match=said):
        trainer.fit()


@pytest.mark.parametrize("start", [0, 2])
def test_a_generator_is_trained_on_from_its_first_batch(start):
    """Its shapes are learnt from a batch that is used all the same."""
    seen = []
    source = ({"x": np.full((16, 8), i, np.float32), "y": np.zeros(16, np.float32)} for i in range(6))
    trainer = Trainer(Network, squares, source, train=TrainConfig(steps=4, global_batch_size=16))
    trainer.compile(trainer.peek_batch(start))
    trainer.peek_batch(start)
    for batch, _ in trainer.batches(start):
        seen.append(int(batch["x"][0, 0]))
        trainer.train_step(batch)
    assert seen == list(range(start, 6))


def test_fit_uses_every_batch_of_a_generator():
    batches = (numpy_batches(ROWS, 16)(i) for i in range(4))
    values = Trainer(Network, squares, batches, train=TrainConfig(steps=4, global_batch_size=16)).fit()
    function = numpy_batches(ROWS, 16)
    wanted = Trainer(Network, squares, function, train=TrainConfig(steps=4, global_batch_size=16)).fit()
    assert values["loss"] == wanted["loss"]


def test_a_loss_gets_the_keywords_that_it_names():
    seen = []

    def loss(model, batch, *, train, **others):
        seen.append((train, others["key"] is not None))
        return squares(model, batch)

    data = numpy_batches(ROWS, 16)
    Trainer(Network, loss, data, train=TrainConfig(steps=1, global_batch_size=16), eval_data=[ROWS]).fit()
    assert set(seen) == {(True, True), (False, False)}


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model: 0.0, r"loss\(model, batch\).*takes \(model\)"),
        (lambda model, batch, rng: 0.0, r"key=.*takes \(model, batch, rng\)"),
        (3, "Python function"),
    ],
)
def test_a_loss_that_cannot_be_called_is_explained(loss, said):
    with pytest.raises(TypeError, match=said):
        Trainer(Network, loss, [{}])


def test_a_loss_may_return_a_mean_or_a_sum_and_further_values():
    def network(rngs):
        return nnx.Sequential(nnx.Linear(8, 1, rngs=rngs), lambda x: x[:, 0])

    def fit(loss, accumulation=1):
        train = TrainConfig(steps=3, global_batch_size=16, gradient_accumulation=accumulation)
        trainer = Trainer(network, loss, numpy_batches(ROWS, 16), optimizer=SGD(learning_rate=0.1), train=train,
                          eval_data=[{name: x[:16] for name, x in ROWS.items()}])  # fmt: skip
        return trainer.fit()

    def summed(model, batch):
        error = (model(batch["x"]) - batch["y"]) ** 2
        count = jnp.float32(len(error))
        return LossSum(error.sum(), count), {"largest": error.max(), "error": LossSum(jnp.abs(error).sum(), count)}

    means = fit(squares)
    sums = fit(summed)
    assert sums["loss"] == pytest.approx(means["loss"], rel=1e-6)
    assert sums["error"] == pytest.approx(sums["loss"], rel=1e-6) and sums["largest"] > sums["error"]
    assert sums["eval_error"] == pytest.approx(sums["eval_loss"], rel=1e-6)
    parts = fit(summed, accumulation=2)
    assert parts["error"] == pytest.approx(sums["error"], rel=1e-5)
    assert fit(lambda model, batch: (squares(model, batch), {"two": 2.0}), accumulation=2)["two"] == 2.0


@pytest.mark.parametrize(
    ("further", "said"),
    [
        ({"loss": 1.0}, "'loss' of the loss function has the name of a metric"),
        ({"wide": jnp.zeros(3)}, r"'wide' of the loss function must be a real scalar or a LossSum; it is an array"),
        ([1.0], "must be a dict"),
    ],
)
def test_further_values_that_cannot_be_metrics_are_explained(further, said):
    trainer = Trainer(Network, lambda model, batch: (squares(model, batch), further), [{}])
    with pytest.raises(TypeError, match=said):
        trainer.train_step(trainer.put({"x": POINTS[:16], "y": ROWS["y"][:16]}))


def test_an_explicit_optimizer_has_no_hidden_schedule_and_no_hidden_clipping():
    """Its steps are those of the same optimizer in optax."""
    ours = own_trainer(optimizer=SGD(learning_rate=0.1, momentum=0.0))
    theirs = own_trainer(optimizer=optax.sgd(0.1))
    large = {"x": 50 * POINTS[:16], "y": 50 * ROWS["y"][:16]}  # gradients of a norm far above 1
    for trainer in (ours, theirs):
        for _ in range(3):
            trainer.train_step(trainer.put(large))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours.state.params, theirs.state.params)
    clipped = own_trainer(optimizer=SGD(learning_rate=0.1, momentum=0.0, clip_norm=1.0))
    before = jax.device_get(clipped.state.params)
    clipped.train_step(clipped.put(large))
    moved = jax.tree.map(lambda a, b: np.sum((np.asarray(a) - b) ** 2), jax.device_get(clipped.state.params), before)
    assert np.sqrt(sum(jax.tree.leaves(moved))) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    ("shape", "names"), [((8,), ("fsdp",)), ((2, 4), ("tensor", "data")), ((2, 2, 2), ("fsdp", "context", "data"))]
)
def test_any_mesh_whose_axes_are_a_subset_of_ours_is_taken(shape, names):
    losses = run_steps(own_trainer(mesh=jax.make_mesh(shape, names)), 3)
    assert losses == pytest.approx(run_steps(own_trainer(), 3), rel=1e-5)


def test_a_layout_has_rules_for_logical_axes():
    layout = StepLayout(sequence=True, axis_rules={"mlp": ("tensor", "data")})
    rules = own_trainer(mesh=jax.make_mesh((8,), ("data",)), layout=layout).rules
    assert rules.table["mlp"] == ("tensor", "data") and rules.table["residual_length"] == ("context", "tensor")


def test_a_batch_of_another_shape_or_with_other_keys_is_named():
    def batches(step):
        batch = {"x": POINTS[:16], "y": ROWS["y"][:16]}
        return batch if step < 2 else {"x": np.tile(batch["x"], 2)}

    trainer = Trainer(Network, squares, batches, train=TrainConfig(steps=4, global_batch_size=16))
    with pytest.raises(JaxstackError, match=r"batch 2 has the shapes \{'x': .*\}, batch 0 had \{.*'y': \(16,.*pad"):
        trainer.fit()


def test_a_batch_of_another_dtype_is_named():
    def batches(step):
        kind = (np.float32, np.float64, np.int32)[step]
        return {"x": (10 * POINTS[:16]).astype(kind), "y": ROWS["y"][:16]}

    trainer = Trainer(Network, squares, batches, train=TrainConfig(steps=3, global_batch_size=16))
    said = r"'x' of batch 2 has dtype int32, in batch 0 it had float32: .*\.astype\('float32'\)"
    with pytest.raises(JaxstackError, match=said):  # float64 is float32 on the devices
        trainer.fit()


@pytest.mark.parametrize(
    "convert",
    [
        float,
        lambda value: value.item(),
        lambda value: np.mean(np.asarray(value)),
        lambda value: value if value > 0 else 0.0,
        lambda value: [0.0, 1.0][value.astype(int)],
    ],
)
def test_a_loss_that_needs_values_in_python_is_told_the_rule_and_its_line(convert):
    trainer = own_trainer(loss=lambda model, batch: convert(squares(model, batch)))
    with pytest.raises(TypeError, match=r"have no values in Python: .*test_trainer\.py, line \d+: .*jnp\.where"):
        trainer.fit()


def test_a_loss_that_looks_for_a_missing_array_is_told_the_keys():
    with pytest.raises(KeyError) as raised:
        own_trainer(loss=lambda model, batch: jnp.mean(batch["label"])).fit()
    assert "(the batch has the keys 'x', 'y')" in raised.value.__notes__


def test_a_complex_loss_is_refused():
    with pytest.raises(TypeError, match=r"a real scalar .* returned an array of shape \(\) and dtype complex64"):
        own_trainer(loss=lambda model, batch: squares(model, batch) + 1j).fit()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("module", "said"),
    [
        (lambda rngs: None, "must return a flax.nnx.Module; it returned NoneType"),
        (lambda rngs: [nnx.Linear(1, 1, rngs=rngs)], "it returned list"),
        (lambda rngs: linen.Dense(1), "returned a Linen module, .*from_linen"),
        (lambda: None, r"this one takes \(\)\. Wrap it: lambda rngs"),
        (nnx.Linear, r"this one takes \(self, in_features.*Wrap it: lambda rngs"),
    ],
)
def test_a_function_that_makes_no_module_is_explained(module, said):
    with pytest.raises(TypeError, match=said):
        Trainer(module, squares, [{}])


@pytest.mark.quick
def test_a_module_without_parameters_is_explained():
    with pytest.raises(ConfigError, match="the module has no parameters"):
        Trainer(lambda rngs: nnx.Dropout(0.1, rngs=rngs), squares, [{}])


class Scaled(nnx.Module):
    """A layer with a further array of the given value."""

    def __init__(self, scale, rngs):
        self.layer = nnx.Linear(2, 1, rngs=rngs)
        self.scale = scale

    def __call__(self, x):
        return self.layer(x) * self.scale[...]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: np.ones(1, np.float32), "scale of the module is a plain array, .* flax.nnx.Variable"),
        (lambda: jnp.ones(1), "scale of the module is a plain array"),
        (lambda: nnx.Param(jnp.arange(1)), "the parameter scale has dtype int32, which has no gradient"),
        (lambda: nnx.Param(jnp.ones(1, bool)), "the parameter scale has dtype bool"),
    ],
)
def test_arrays_that_cannot_be_trained_are_named(make, said):
    for module in (lambda rngs: Scaled(make(), rngs), Scaled(make(), nnx.Rngs(0))):
        with pytest.raises(TypeError, match=said):
            Trainer(module, squares, [{}])


@pytest.mark.quick
def test_parameters_of_half_precision_are_named():
    trainer = Trainer(lambda rngs: Scaled(nnx.Param(jnp.ones(1, jnp.float16)), rngs), squares, [{}])
    batch = {"x": jax.ShapeDtypeStruct((4, 2), jnp.float32), "y": jax.ShapeDtypeStruct((4, 1), jnp.float32)}
    with pytest.raises(TypeError, match="needs parameters in float32; scale is float16. Create them"):
        jax.eval_shape(trainer.steps.train_step, trainer.abstract_state, batch)


def test_wrong_arguments_are_explained():
    with pytest.raises(TypeError, match=r"schedule must be .*Cosine\(.*optax.adamw\(schedule\); found 'cosine'"):
        own_trainer(schedule="cosine")
    with pytest.raises(TypeError, match="schedule must be"):
        own_trainer(schedule=optax.constant_schedule(1.0))
    with pytest.raises(ConfigError, match="the mesh has an axis 'model', which is none of pipeline, data, .*rename it"):
        own_trainer(mesh=jax.make_mesh((1,), ("model",)))
    with pytest.raises(TypeError, match="mesh must be a jax.sharding.Mesh"):
        own_trainer(mesh="data")
    with pytest.raises(TypeError, match="layout must be a jaxstack.parallel.StepLayout; found 'fsdp'"):
        own_trainer(layout="fsdp")
    with pytest.raises(TypeError, match="settings must be jaxstack.loop.LoopSettings"):
        own_trainer().fit(None, {"checkpoint": 1})
    with pytest.raises(TypeError, match=r"data is called with the number of the step; this function takes \(\)"):
        Trainer(Network, squares, lambda: ROWS)
    with pytest.raises(TypeError, match="batches"):
        Trainer(Network, squares, 3)
    with pytest.raises(
        TypeError, match=r"a module of flax.linen; found flax.*Linear: give Trainer a function `rngs -> "
    ):
        from_linen(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="from_linen"):
        Trainer(LinenNetwork(), squares, [{}])
    with pytest.raises(TypeError, match="from_linen"):
        Trainer(LinenNetwork, squares, [{}])
    with pytest.raises(TypeError, match=r"not one dict with the keys 'x', 'y'; .*lambda step: batch"):
        Trainer(Network, squares, ROWS)
    with pytest.raises(TypeError, match=r"optimizer must be .*AdamW\(learning_rate=1e-3\).*found 'adam'"):
        own_trainer(optimizer="adam")
    with pytest.raises(TypeError, match=r"eval_data must be batches, not one dict .*give \[batch\]"):
        Trainer(Network, squares, [{}], eval_data=ROWS)
    with pytest.raises(TypeError, match="eval_data must be an iterable of batches, such as a list; found function"):
        Trainer(Network, squares, [{}], eval_data=lambda step: {})
    with pytest.raises(TypeError, match=r"train must be a TrainConfig.*found \{'steps': 2\}"):
        Trainer(Network, squares, [{}], train={"steps": 2})
    with pytest.raises(TypeError, match="found str"):
        Trainer(Network, squares, "data")
    with pytest.raises(TypeError, match="loss"):
        Trainer(Network, "mse", [{}])
    with pytest.raises(JaxstackError, match="the data has no batch"):
        Trainer(Network, squares, iter([])).fit()


def test_a_loss_that_ignores_the_model_is_warned_about(capfd):
    own_trainer(steps=2, loss=lambda model, batch: jnp.mean(batch["y"] ** 2)).fit()
    printed = capfd.readouterr()
    assert "does the loss depend on the model?" in printed.out + printed.err
    own_trainer(steps=2).fit()
    own_trainer(steps=2, loss=lambda model, batch: 0 * squares(model, batch)).fit()  # as of answers with equal rewards
    assert "depend on the model" not in "".join(capfd.readouterr())


def test_data_that_ends_early_is_saved_first(tmp_path):
    batches = [{name: x[:16] for name, x in ROWS.items()}] * 5
    trainer = Trainer(Network, squares, iter(batches), train=TrainConfig(steps=8, global_batch_size=16))
    with pytest.raises(JaxstackError, match=r"ended after 5 batches, but train.steps is 8; checkpoint 5 is saved"):
        trainer.fit(tmp_path, settings(every_steps=100))
    assert CheckpointManager(tmp_path / "checkpoints").all_steps() == [5]
    report = (tmp_path / "report.html").read_text()
    assert "The run failed after step 5; the newest checkpoint is of step 5." in report
    assert json.loads((tmp_path / "environment.json").read_text())["ended"]["state"] == "failed"


@dataclasses.dataclass
class HeldOut:
    rows: int = 24

    def __iter__(self):
        for start in range(0, self.rows, 8):
            yield {"x": POINTS[start : start + 8], "y": ROWS["y"][start : start + 8]}


def test_held_out_data_is_evaluated_without_keys():
    keys = []

    def loss(model, batch, key):
        keys.append(key is None)
        error = (model(batch["x"]) - batch["y"]) ** 2
        return LossSum(error.sum(), jnp.float32(len(error)))

    def network(rngs):
        return nnx.Sequential(nnx.Linear(8, 1, rngs=rngs), lambda x: x[:, 0])

    trainer = Trainer(
        network, loss, numpy_batches(ROWS, 8), train=TrainConfig(steps=2, global_batch_size=8), eval_data=HeldOut()
    )
    values = trainer.fit()
    model = trainer.trained_module
    wanted = float(np.mean((np.asarray(model(POINTS[:24])) - ROWS["y"][:24]) ** 2))
    assert values["eval_loss"] == pytest.approx(wanted, rel=1e-5) and values["eval_items"] == 24
    assert set(keys) == {True, False}


LANGUAGE = ("train.steps=12", "train.global_batch_size=8", "model.dropout=0.1", "train.gradient_accumulation=2")


def language_fit(run_dir, *overrides, **checkpoint):
    return make_trainer(small_config(*LANGUAGE, *overrides)).fit(run_dir, settings(**checkpoint))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    language_fit(folder)
    return folder


class Broken(RuntimeError):
    pass


def break_off(run_dir, after: int, *overrides) -> None:
    """A run whose data fail for good after some batches."""

    def data(step):
        if step >= after:
            raise Broken
        return batch_at(step, 8)

    with pytest.raises(Exception):  # noqa: B017 - the reader's own error may be wrapped
        make_trainer(small_config(*LANGUAGE, *overrides), data).fit(run_dir, settings())


def test_a_run_that_was_broken_off_goes_on_bit_for_bit(unbroken, tmp_path):
    """A new Trainer in the same run directory: parameters, moments, keys and data position are all taken up."""
    break_off(tmp_path, 7)
    language_fit(tmp_path)
    found = losses_of(tmp_path)
    wanted = losses_of(unbroken)
    assert set(wanted) == set(range(1, 13)) and found == wanted


def test_a_run_goes_on_with_another_layout(unbroken, tmp_path):
    """On four devices instead of one, from a copy of the first checkpoint."""
    shutil.copytree(unbroken / "checkpoints" / "4", tmp_path / "checkpoints" / "4")
    layout = ("parallel.fsdp=2", "parallel.tensor=2", "model.dropout=0", "train.gradient_accumulation=1")
    start = make_trainer(small_config(*LANGUAGE, *layout))
    start.fit(tmp_path, settings())
    whole = make_trainer(small_config(*LANGUAGE, "model.dropout=0", "train.gradient_accumulation=1"))
    shutil.copytree(unbroken / "checkpoints" / "4", tmp_path / "one" / "checkpoints" / "4")
    whole.fit(tmp_path / "one", settings())
    found = losses_of(tmp_path)
    wanted = losses_of(tmp_path / "one")
    assert list(wanted) == list(range(5, 13))
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-5)


def test_a_finished_run_says_so_and_can_be_lengthened(tmp_path, capfd):
    own_trainer(steps=6).fit(tmp_path, settings())
    before = losses_of(tmp_path)
    own_trainer(steps=6).fit(tmp_path, dataclasses.replace(settings(), observe=ObserveConfig(trackers=("jsonl",))))
    printed = capfd.readouterr()
    assert losses_of(tmp_path) == before and "raise train.steps" in printed.out + printed.err
    assert "The run" not in (tmp_path / "report.html").read_text()
    own_trainer(steps=8).fit(tmp_path, settings())
    own_trainer(steps=8).fit(tmp_path / "whole", settings())
    assert losses_of(tmp_path) == losses_of(tmp_path / "whole") and len(losses_of(tmp_path)) == 8


def test_metrics_that_found_no_room_until_the_end_are_written_by_the_next_start(tmp_path, monkeypatch):
    """The last checkpoint has them: the run has nothing else left to do."""

    def no_room(file, record):
        file._waiting += record
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        opening = RunLog.open_trackers

        def open_and_fill(log, *arguments):
            opening(log, *arguments)
            patch.setattr(_WholeRecords, "append", no_room)

        patch.setattr(RunLog, "open_trackers", open_and_fill)
        own_trainer(steps=4, eval_data=HeldOut()).fit(tmp_path, settings())
    assert losses_of(tmp_path) == {}
    own_trainer(steps=4, eval_data=HeldOut()).fit(tmp_path, settings())
    assert list(losses_of(tmp_path)) == [1, 2, 3, 4]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5 and "eval_loss" in lines[-1]


def test_an_evaluation_before_which_a_run_was_ended_is_made_by_the_next_start(tmp_path):
    def evaluated() -> dict[int, float]:
        train = TrainConfig(steps=8, global_batch_size=16, eval_every_steps=4)
        parts = {"optimizer": AdamW(learning_rate=0.02), "schedule": Constant(), "eval_data": HeldOut()}
        Trainer(Network, squares, numpy_batches(ROWS, 16), train=train, **parts).fit(tmp_path, settings())
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}

    metrics = tmp_path / "metrics.jsonl"
    before = evaluated()
    assert list(before) == [4, 8]
    # As after a kill between the checkpoint of step 4 and its evaluation.
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]))
    shutil.rmtree(tmp_path / "checkpoints" / "8")
    assert evaluated() == before


def test_a_run_that_is_longer_than_asked_for_keeps_its_step(tmp_path, capfd):
    own_trainer(steps=6, eval_data=HeldOut()).fit(tmp_path, settings())
    started = []
    observe = ObserveConfig(trackers=("jsonl",))
    again = dataclasses.replace(settings(), observe=observe, on_start=lambda: started.append(True))
    own_trainer(steps=4, eval_data=HeldOut()).fit(tmp_path, again)
    printed = "".join(capfd.readouterr())
    assert "the run has 6 steps, more than train.steps=4" in printed and "step 4: held-out" not in printed
    assert not started  # config.yaml still says how long the run is


def test_a_finished_and_evaluated_run_compiles_nothing_when_it_is_started_again(tmp_path, capfd):
    first = own_trainer(steps=3, eval_data=HeldOut()).fit(tmp_path, settings())
    capfd.readouterr()
    again = dataclasses.replace(settings(), observe=ObserveConfig(trackers=("jsonl",)))
    values = own_trainer(steps=3, eval_data=HeldOut()).fit(tmp_path, again)
    printed = "".join(capfd.readouterr())
    assert "raise train.steps" in printed and "compiled" not in printed and "held-out" not in printed
    assert values["eval_loss"] == first["eval_loss"] and values["loss"] == first["loss"]


def test_another_batch_size_is_refused(tmp_path):
    own_trainer(steps=4).fit(tmp_path, settings())
    with pytest.raises(JaxstackError, match="global_batch_size") as caught:
        own_trainer(steps=6, batch=32).fit(tmp_path, settings())
    assert len(str(caught.value).splitlines()) == 1


def test_metrics_have_the_contracts_keys(unbroken):
    lines = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    assert all(set(line) >= CONTRACT_KEYS for line in lines if "loss" in line)
    assert [line["tokens"] for line in lines if "loss" in line] == [128 * step for step in range(1, 13)]
    assert all(0 <= line["data_wait_fraction"] <= 1 for line in lines if "loss" in line)


def test_a_run_leaves_its_report_and_environment(unbroken):
    environment = json.loads((unbroken / "environment.json").read_text())
    assert environment["ran"]["kernels"] and "memory" in environment["ran"]
    assert environment["ran"]["sharding"]["parameters"]
    page = (unbroken / "report.html").read_text()
    assert "<svg" in page and "loss" in page


def poisoned(bad: set[int]):
    def data(step):
        batch = {"x": POINTS[:16], "y": ROWS["y"][:16].copy()}
        if step in bad:
            batch["y"][0] = np.nan
        return batch

    return data


def network(rngs):
    return nnx.Sequential(nnx.Linear(8, 1, rngs=rngs), lambda x: x[:, 0])


def test_steps_that_are_not_finite_are_skipped_and_counted(tmp_path):
    trainer = Trainer(network, squares, poisoned({3, 4, 7}), train=TrainConfig(steps=10, global_batch_size=16))
    said = []
    values = trainer.fit(tmp_path, dataclasses.replace(settings(), say=said.append))
    assert values["skipped_steps"] == 3 and np.isfinite(values["loss"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(trainer.state.params)))


def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path):
    trainer = Trainer(network, squares, poisoned(set(range(4, 100))), train=TrainConfig(steps=30, global_batch_size=16))
    limit = dataclasses.replace(settings(), resilience=ResilienceConfig(max_skipped_steps=3))
    with pytest.raises(JaxstackError, match="3 steps in a row.*max_skipped_steps.*after step 4"):
        trainer.fit(tmp_path, limit)
    assert (tmp_path / "report.html").exists()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(trainer.state.params)))


def test_a_checkpoint_from_before_a_field_was_added_loads(tmp_path):
    """The first release kept no history of losses."""
    trainer = own_trainer(steps=4)
    trainer.fit(tmp_path, settings())
    found = jax.device_get(trainer.state.params)
    manager = CheckpointManager(tmp_path / "checkpoints")
    old = {name: value for name, value in trainer.stored_state._asdict().items() if name not in LATER_FIELDS}
    manager.save(4, old, manager.extra(4), wait=True)
    manager.close()
    said = []
    again = own_trainer(steps=4)
    again.fit(tmp_path, dataclasses.replace(settings(), say=said.append))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.state.params), found)
    assert int(again.state.history.count) == 0
    assert any("is older than 'history', which begins anew" in line for line in said)


def test_a_changed_configuration_is_told_and_a_grown_one_is_not(tmp_path):
    def fit(steps: int, **model) -> list[str]:
        said = []
        described = {"model": model, "observe": {"log_every": steps}}
        own_trainer(steps=steps).fit(tmp_path, dataclasses.replace(settings(), settings=described, say=said.append))
        return [line for line in said if "not as checkpoint" in line]

    assert fit(4, rope_theta=1e4) == []
    assert fit(4, rope_theta=1e4, since_a_later_version=1) == []
    (line,) = fit(4, rope_theta=500.0)
    assert line == "warning: not as checkpoint 4 was trained: model.rope_theta was 10000.0, is 500.0"


def test_throughput_counts_rows_where_there_are_no_tokens():
    values = own_trainer(steps=3).fit()
    assert values["tokens"] == 48
