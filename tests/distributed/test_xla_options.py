"""XLA's options of the step: those that are set are known, others are translated or left out, and it is said."""

import ctypes
import importlib.metadata
import os

import jax
import numpy as np
import pytest

from jaxstack.distributed import xla_options as compiler_options
from jaxstack.distributed.xla_options import (
    ALWAYS,
    COPIES_BETWEEN_PROCESSES,
    NARROW_ON_CPU,
    ONE_SIDED_NCCL,
    PEER_COPIES,
    PIPELINE,
    is_supported,
    step_options,
    translate_options,
)
from jaxstack.errors import ConfigError
from jaxstack.run import build as run_build
from jaxstack.run_config import load_config
from tests.small_runs import make_trainer, run_steps, small_config, unpacked_batch_at


def test_options_follow_what_the_step_holds():
    plain = step_options()
    pipeline = step_options(pipeline=True)
    assert plain == {option.name: option.value for option in ALWAYS}
    assert plain["xla_gpu_enable_triton_gemm"] is False
    assert pipeline == {**plain, **{option.name: option.value for option in PIPELINE}}
    assert step_options(peer_copies=True) == {**plain, **{option.name: option.value for option in PEER_COPIES}}


@pytest.mark.parametrize("version", [(2, 28, 9), ONE_SIDED_NCCL, (2, 32, 3), ()])
def test_copies_between_processes_need_a_nccl_with_one_sided_transfers(monkeypatch, version):
    monkeypatch.setattr(compiler_options, "nccl_version", lambda: version)
    wanted = COPIES_BETWEEN_PROCESSES if version >= ONE_SIDED_NCCL else PEER_COPIES
    assert step_options(peer_copies=True, several_processes=True) == step_options() | {
        one.name: one.value for one in wanted
    }
    assert step_options(several_processes=True) == step_options()


def test_the_version_of_nccl_is_that_of_the_package(monkeypatch):
    # None is loaded on a CPU, and asking for the version loads none.
    with pytest.raises(OSError):
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
    monkeypatch.setattr(importlib.metadata, "version", {"nvidia-nccl-cu13": "2.29.7"}.__getitem__)
    assert compiler_options.nccl_version() == (2, 29, 7)


def test_an_option_that_the_installed_jaxlib_lacks_is_left_out_and_named():
    assert not is_supported("xla_gpu_no_such_option", True)
    chosen, said = translate_options({"xla_gpu_no_such_option": True, "xla_gpu_autotune_level": 0})
    assert chosen == {"xla_gpu_autotune_level": 0}
    assert len(said) == 1 and "xla_gpu_no_such_option=True is left out: jaxlib " in said[0]


@pytest.mark.parametrize("on", [True, False])
def test_either_name_of_pipelined_collectives_is_translated(on):
    spellings = [(name, value) for name, value in compiler_options.EQUIVALENT[0 if on else 1]]
    settings = [translate_options({name: value}) for name, value in spellings]
    assert len({tuple(chosen.items()) for chosen, _ in settings}) == 1 and settings[0][0]
    assert sorted(len(said) for _, said in settings) == [0, 1, 1, 1], "one is this jaxlib's own"


def test_a_wrong_value_is_an_error():
    with pytest.raises(ConfigError, match=r"xla_gpu_autotune_level='high': .*not a valid int32"):
        translate_options({"xla_gpu_autotune_level": "high"})


def test_a_runs_own_options_are_used_and_described():
    trainer = make_trainer(small_config("train.xla_options={xla_gpu_no_such: 1, xla_gpu_autotune_level: 0}"))
    assert trainer.compiler_options == {"xla_gpu_autotune_level": 0}
    assert [line for line in trainer.compiler_notes if "xla_gpu_no_such" in line] == trainer.compiler_notes


def test_a_step_in_bfloat16_runs_on_any_cpu():
    """Of this model some products were left to nobody on a CPU with instructions for bfloat16."""
    sizes = ["model.vocab_size=512", "model.num_layers=1", "parallel.data=1"]
    config = load_config("configs/quickstart.yaml", ["precision.compute=bfloat16", *sizes])
    rows = config.train.global_batch_size
    length = config.train.sequence_length

    def data(step):
        return unpacked_batch_at(step, rows, length, 512)

    trainer = run_build.make_trainer(config, data, jax.devices()[:1])
    assert trainer.compiler_options == {option.name: option.value for option in NARROW_ON_CPU}
    assert run_steps(trainer, 1) == [pytest.approx(np.log(512), rel=0.02)]
