"""The flat namespace of jaxstack, and commands whose modules have the names of library functions."""

import subprocess
import sys

import pytest

import jaxstack

pytestmark = pytest.mark.longer  # a few seconds each

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


def test_commands_do_without_the_packages_of_extras():
    """`pip install -e .` is enough to train; what needs an extra imports its packages when it is used."""
    program = """
import sys
extras = ["jinja2", "pyarrow", "zstandard", "fsspec", "optuna", "wandb", "mlflow", "lm_eval", "starlette", "uvicorn",
          "prometheus_client", "llguidance", "onnx", "flatbuffers", "transformers"]
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in extras:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import jaxstack.run.train, jaxstack.run.load, jaxstack.run.evaluate, jaxstack.run.generate, jaxstack.run.convert
import jaxstack.plan.cluster_search, jaxstack.compress.after_training.run, jaxstack.export.source
import jaxstack.checkpoint.__main__, jaxstack.prepare, jaxstack.serve.__main__, jaxstack.decoding.engine
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
