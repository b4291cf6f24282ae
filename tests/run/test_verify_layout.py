"""`resilience.verify_layout`: a small model in the run's layout against one device."""

import dataclasses
import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxstack.data.device_batches import abstract_batch
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.parallel import make_mesh
from jaxstack.parameter_paths import path_name
from jaxstack.run import small_copy as small_copies
from jaxstack.run import verify_layout as module
from jaxstack.run.build import make_trainer
from jaxstack.run.small_copy import in_float32, small_copy
from jaxstack.run.verify_layout import check_layout, verify_layout
from tests.hopper import hopper_topology
from tests.small_runs import small_config

LAYOUT = ("parallel.fsdp=2", "parallel.tensor=2", "train.global_batch_size=4")
AGREES = "layout fsdp 2 x tensor 2: a small copy of the model has the loss and gradients of one device (in float32"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, value in (("_WIDTH", 32), ("VOCABULARY", 64), ("_LENGTH", 16)):
        monkeypatch.setattr(small_copies, name, value)


@pytest.fixture
def cache(tmp_path):
    """A compilation cache, beside whose programs right layouts are recorded."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def make_wrong(monkeypatch, wrong_path: str = "final_norm", *, always: bool = True) -> None:
    """Has a layout add some gradients over half of the devices, in each batch or only in the first one."""
    make_trainer = module.make_trainer

    def wrong(config, data, devices):
        trainer = make_trainer(config, data, devices)
        if len(devices) > 1:
            gradients = trainer.steps.gradients
            first = data(0)["tokens"]

            @functools.wraps(gradients)
            def halved(params, others, batch, key, **settings):
                sums, others = gradients(params, others, batch, key, **settings)
                factor = 0.5 if always else jnp.where((batch["tokens"] == first).all(), 0.5, 1)
                half = jax.tree.map_with_path(
                    lambda path, g: g * factor if wrong_path in path_name(path) else g, sums.gradients
                )
                return dataclasses.replace(sums, gradients=half), others

            monkeypatch.setattr(trainer.steps, "gradients", halved)
        return trainer

    monkeypatch.setattr(module, "make_trainer", wrong)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.preset=llama3-70b", "parallel.tensor=8", "train.sequence_length=1024"),
        ("model.preset=deepseek-v3", "parallel.expert=4", "parallel.tensor=2", "train.global_batch_size=8"),
        (
            "model.preset=gemma2-2b",
            "model.num_layers=26",
            "parallel.pipeline=2",
            "parallel.context=2",
            "train.gradient_accumulation=4",
        ),
        ("parallel.pipeline=2", "parallel.microbatches=16", "train.global_batch_size=32"),
        ("parallel.fsdp=2", "parallel.copy_engines=always", "train.gradient_accumulation=4"),
    ],
    ids=str,
)
def test_a_small_copy_has_the_kinds_of_layers_of_the_model(overrides):
    config = small_config(*overrides)
    small = small_copy(config)
    assert small.layout_problems() == [] and small.parallel == config.parallel
    assert set(small.model.layers()) == set(config.model.layers())
    assert small.model.num_layers <= 8 and small.model.hidden_size == 32
    assert small.train.gradient_accumulation <= (2 if config.parallel.pipeline == 1 else 4)


def test_rules_for_layers_that_a_small_copy_lacks_are_left_out_of_it():
    rules = "[{path: layers/7/, frozen: true}, {path: adapter/b, frozen: true}, {path: embedding, frozen: true}]"
    config = small_config(
        *LAYOUT, "model.num_layers=8", "model.scan_layers=false", f"optimizer.groups={rules}",
        "adapters.rules=[{path: layers/6/.*q_proj}, {path: k_proj}]",
        "precision.fp8=current", "precision.fp8_rules=[{path: layers/7/, fp8: false}]",
    )  # fmt: skip
    small = small_copy(config)
    assert small.model.num_layers < 6
    assert [rule.path for rule in small.optimizer.groups] == ["adapter/b", "embedding"]
    assert [rule.path for rule in small.adapters.rules] == ["k_proj"]
    assert small.precision.fp8_rules == ()


def test_a_small_copy_in_float32_drops_nothing_and_names_no_kernel():
    config = small_config(
        *LAYOUT, "model.attention_implementation=mosaic", "model.dropout=0.1", "precision.compute=bfloat16",
        "precision.fp8=current", "precision.reduce=bfloat16", "adapters.rules=[{path: q_proj, dropout: 0.5}]",
    )  # fmt: skip
    small = in_float32(small_copy(config))
    assert small.precision.compute == "float32" and small.precision.fp8 == "none"
    assert small.precision.reduce == "bfloat16"
    assert small.model.attention_implementation is None and small.model.dropout == 0
    assert [rule.dropout for rule in small.adapters.rules] == [0]


@pytest.mark.longer
def test_a_right_layout_is_checked_once_by_default(cache):
    said = []
    check_layout(small_config(*LAYOUT), said.append)
    (line,) = said
    assert line.startswith(AGREES) and line.endswith(" s)")
    check_layout(small_config(*LAYOUT, "train.steps=7", "optimizer.name=lion", "run.name=other"), said.append)
    assert len(said) == 1
    (record,) = (cache / "verified_layouts").iterdir()
    record.unlink()
    check_layout(small_config(*LAYOUT), said.append)
    assert len(said) == 2


@pytest.mark.longer
def test_a_wrong_gradient_stops_the_run_by_default_at_each_start(cache, monkeypatch):
    make_wrong(monkeypatch)
    message = r"fsdp 2 x tensor 2 computes another gradient of final_norm/scale than one device, by 0\.5 "
    for _ in range(2):
        with pytest.raises(JaxstackError, match=message):
            check_layout(small_config(*LAYOUT), print)
    assert not (cache / "verified_layouts").exists()


@pytest.mark.longer
def test_what_differs_in_one_batch_alone_is_rounding(monkeypatch):
    make_wrong(monkeypatch, always=False)
    said = []
    check_layout(small_config(*LAYOUT), said.append)
    assert said[0].startswith(AGREES)


@pytest.mark.parametrize(
    "overrides",
    [
        LAYOUT,
        ("model.moe={num_experts: 8, implementation: mosaic}", "parallel.expert=2", "parallel.fsdp=2"),
        ("model.layer_types=[ssd]", "parallel.context=2", "parallel.tensor=2"),
    ],
    ids=str,
)
def test_on_gpus_only_operations_of_xla_are_compared_in_float32(overrides):
    """Traced for H200s, as `_prepare` does there: only the layout can differ."""
    config = small_config(*overrides, "precision.compute=bfloat16", "train.global_batch_size=4")
    small = in_float32(small_copy(config))
    mesh = make_mesh(small.parallel, hopper_topology(4).devices)
    batch = module._batch_of(small)
    with module._plain_operations("gpu"):
        trainer = make_trainer(small, batch, mesh=mesh)
        trainer.program.lower(abstract_batch(batch(0), trainer.rules, small.train.global_batch_size))
    backends = {choice.backend for choice in trainer.choices}
    assert backends and not [name for name in backends if name.startswith(("mosaic", "triton", "cudnn", "overlapped"))]


@pytest.mark.longer
def test_true_compares_in_the_precision_of_the_run(cache):
    said = []
    for _ in range(2):
        verify_layout(small_config(*LAYOUT, "precision.compute=bfloat16"), said.append)
    assert len(said) == 2 and all("one device (in bfloat16, " in line for line in said)


@pytest.mark.parametrize("place", ["make_trainer", "_place", "small_copy", "_hash_of_sources"])
def test_an_error_of_the_check_itself_is_no_error_of_the_run(place, cache, monkeypatch):
    def fails(*_):
        raise RuntimeError("no room\nand more lines")

    monkeypatch.setattr(module, place, fails)
    said = []
    check_layout(small_config("parallel.fsdp=2"), said.append)
    assert said == ["layout check left out: RuntimeError: no room"]
    assert not (cache / "verified_layouts").exists()


@pytest.mark.longer
def test_true_says_in_one_message_that_a_loss_says_nothing(monkeypatch):
    monkeypatch.setattr(module, "_is_finite", lambda result: False)
    config = small_config("parallel.fsdp=2", "resilience.verify_layout=true")
    with pytest.raises(ConfigError, match=r"^the layout cannot be checked: .* not finite, .*verify_layout to false\.$"):
        check_layout(config, print)


@pytest.mark.longer
def test_a_wrong_gradient_of_what_zeros_hide_at_first_is_found(monkeypatch):
    """The first matrix of an adapter has no gradient while the second one is zero."""
    make_wrong(monkeypatch, "adapter/a")
    with pytest.raises(JaxstackError, match=r"another gradient of decoder/layers/0/\S+/adapter/a than one device"):
        check_layout(small_config("parallel.fsdp=2", "adapters.rules=[{path: q_proj}]"), print)


def test_a_check_that_takes_too_long_is_left_out(cache, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.01)
    said = []
    check_layout(small_config(*LAYOUT), said.append)
    (line,) = said
    assert re.fullmatch(r"layout check left out: compiling it takes more than 0 s; .*=true waits for it\.", line)
    assert not (cache / "verified_layouts").exists()


LATE = """
from jaxstack.run import verify_layout
from tests.small_runs import small_config
verify_layout.SECONDS = 0.01
verify_layout.check_layout(small_config("parallel.fsdp=2"), print)
"""


@pytest.mark.longer
def test_a_process_ends_without_an_error_while_a_late_check_compiles():
    ended = subprocess.run([sys.executable, "-c", LATE], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "") and "takes more than" in ended.stdout


@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.data=1",),
        ("parallel.data=4",),
        (*LAYOUT, "resilience.verify_layout=false"),
    ],
    ids=str,
)
def test_nothing_is_compared_where_nothing_is_split(overrides, monkeypatch):
    monkeypatch.setattr(module, "make_trainer", None)
    check_layout(small_config(*overrides), pytest.fail)
    assert small_config().resilience.verify_layout == "auto"


def test_a_run_on_fewer_devices_than_before_is_not_held_up(monkeypatch):
    monkeypatch.setattr(module, "make_trainer", None)
    check_layout(small_config(*LAYOUT), pytest.fail, resized=True)


def test_the_record_is_of_one_program_on_one_kind_of_devices(cache, monkeypatch):
    def name(*overrides: str):
        return module._record_of(in_float32(small_copy(small_config(*LAYOUT, *overrides))))

    assert name() == name("train.steps=7", "run.seed=3", "data.held_out_fraction=0.1")
    names = [name(), name("parallel.sequence=true"), name("model.post_norms=true"), name("precision.reduce=bfloat16")]
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    names.append(name())
    monkeypatch.setattr(module, "_hash_of_sources", lambda: "other sources")
    names.append(name())
    assert len(set(names)) == 6 and all(path and path.parent == cache / "verified_layouts" for path in names)
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/compiled")
    assert name() is None


def test_one_worker_is_checked_in_one_process_only(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = small_config("parallel.workers=2", "parallel.fsdp=2")
    with pytest.raises(ConfigError, match=r"parallel.workers is 2; set resilience.verify_layout to false"):
        verify_layout(config, print)
    said = []
    check_layout(config, said.append)
    assert said[0].startswith("layout check left out: it compares one worker's layout")
