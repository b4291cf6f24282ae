"""What is set before JAX touches a device."""

import os

from jaxstack.startup import DEVICE_MEMORY, HOST_MEMORY, use_whole_memory


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
