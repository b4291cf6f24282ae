"""The flat namespace of jaxstack, and commands whose modules have the names of library functions."""

import subprocess
import sys

import jaxstack

NAMES = ["Trainer", "TrainConfig", "load_config", "load", "train", "evaluate", "generate", "optim", "schedules"]


def test_the_names_are_there_and_are_loaded_when_they_are_used():
    program = (
        "import sys, jaxstack; assert 'jax' not in sys.modules and 'flax' not in sys.modules; "
        f"from jaxstack import LossSum, {', '.join(NAMES)}; "
        "assert callable(train) and callable(evaluate) and callable(generate); "
        "assert schedules.Cosine and optim.AdamW and optim.schedules is schedules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_command_that_was_imported_is_still_the_function(monkeypatch):
    import jaxstack.generate as command
    from jaxstack.run import load

    monkeypatch.setattr(load, "generate", lambda *given, **settings: (given, settings))
    assert jaxstack.generate("runs/a", ["x"], max_tokens=2) == (("runs/a", ["x"]), {"max_tokens": 2})
    assert command.main and jaxstack.generate is command
