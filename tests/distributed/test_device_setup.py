"""What is set before JAX touches a device."""

import os
import stat
from pathlib import Path

import jax
import pytest
from jaxlib import xla_client

from jaxstack.distributed.device_setup import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    cache_compilations,
    start_devices,
    use_whole_memory,
)
from jaxstack.errors import ConfigError
from jaxstack.run import setting
from jaxstack.run import train as run_train
from jaxstack.run_config import load_config

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_a_command_may_use_nearly_all_memory(monkeypatch):
    for name in (DEVICE_MEMORY, HOST_MEMORY):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    use_whole_memory()
    assert os.environ[DEVICE_MEMORY] == "0.92"
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert 1 <= int(os.environ[HOST_MEMORY]) <= max(1, there)


def test_the_users_own_settings_win(monkeypatch):
    monkeypatch.setenv(DEVICE_MEMORY, "0.5")
    monkeypatch.setenv(HOST_MEMORY, "7")
    use_whole_memory()
    assert (os.environ[DEVICE_MEMORY], os.environ[HOST_MEMORY]) == ("0.5", "7")


def test_the_newer_name_of_the_users_own_setting_wins_too(monkeypatch):
    """With both names jaxlib starts no GPU."""
    monkeypatch.setenv(DEVICE_MEMORY, "")
    monkeypatch.delenv(DEVICE_MEMORY)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    use_whole_memory()
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.5


@pytest.fixture
def cache_setting(monkeypatch):
    """No directory of the tests' own; what JAX is told is taken back."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize(
    ("option", "name"), [("jax_enable_x64", "JAX_ENABLE_X64"), ("jax_disable_jit", "JAX_DISABLE_JIT")]
)
def test_settings_of_jax_that_break_the_step_are_refused(option, name):
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        with pytest.raises(ConfigError, match=f"unset {name}"):
            start_devices()
    finally:
        jax.config.update(option, before)


def test_a_platform_that_is_not_there_is_named(monkeypatch):
    def absent():
        raise AssertionError  # as JAX does for JAX_PLATFORMS=cuda without a GPU

    monkeypatch.setattr(jax, "device_count", absent)
    with pytest.raises(ConfigError, match="JAX finds no usable device: there is none for JAX_PLATFORMS="):
        start_devices()


def test_compiled_programs_are_kept_where_nobody_else_can_write(tmp_path, monkeypatch, cache_setting):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_compilations()
    assert path == tmp_path / "jaxstack" / "compiled" and jax.config.jax_compilation_cache_dir == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    assert cache_compilations() == Path("/elsewhere") and jax.config.jax_compilation_cache_dir == str(path)


def test_a_run_keeps_its_compiled_programs_without_being_asked(monkeypatch):
    class AskedForError(Exception):
        pass

    def asked():
        raise AskedForError

    monkeypatch.setattr(setting, "cache_compilations", asked)
    with pytest.raises(AskedForError):
        run_train.train(load_config(CONFIG, ["parallel.data=4", "parallel.tensor=2"]))
