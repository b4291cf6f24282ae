"""Uses the feature of one extra of pyproject.toml once, in an environment that has only the package and that extra.

python .ci/extras.py requirements EXTRA   prints what the extra installs, one requirement a line
python .ci/extras.py train FOLDER         trains a very small run in FOLDER/run, for the others
python .ci/extras.py EXTRA FOLDER         uses the feature of the extra on that run
"""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["model.hidden_size=32", "model.num_layers=1", "model.num_heads=2", "model.intermediate_size=48"]
SMALL += ["train.sequence_length=32", "train.global_batch_size=4", "train.steps=2", "schedule.warmup_steps=0"]
SMALL += ["data.tokenizer.name=byte"]


def requirements(extra: str) -> list[str]:
    """Return the requirements that an extra adds to the dependencies of the package."""
    from pip._vendor.packaging.requirements import Requirement

    parsed = [Requirement(text) for text in importlib.metadata.requires("jaxstack") or ()]
    chosen = [r for r in parsed if r.marker and r.marker.evaluate({"extra": extra}) and "extra" in str(r.marker)]
    return [f"{r.name}{r.specifier}" for r in chosen]


def jaxstack(command: str, *arguments: object) -> str:
    """Run a command of the package; return what it printed."""
    words = [sys.executable, "-m", f"jaxstack.{command}", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"jaxstack {command} ended with {done.returncode}: {done.stdout}\n{done.stderr}")
    return done.stdout


def text_in(folder: Path) -> list[str]:
    """Overrides that train on a few texts in `folder`."""
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(8):
        (texts / f"{number}.txt").write_text(f"text number {number} has some words. " * 40)
    return [f"data.sources=[{{path: {texts}}}]", f"data.cache_dir={folder}/cache"]


def train(folder: Path, *overrides: str) -> None:
    place = [f"run.dir={folder}", "run.name=run"]
    jaxstack("train", "--config", ROOT / "configs/quickstart.yaml", *SMALL, *text_in(folder), *place, *overrides)


def use_data(folder: Path) -> None:
    """Tokenize a parquet file and a compressed one, and format a chat by a template."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    source = folder / "files"
    source.mkdir()
    lines = ["a text of several words. " * 20] * 40
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), source / "a.parquet")
    packed = "\n".join(json.dumps({"text": line}) for line in lines).encode()
    (source / "b.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(packed))
    said = jaxstack("prepare", "--source", source, "--output", folder / "shards", "--tokenizer", "byte", "--workers", 1)
    assert "train: 80 documents" in said, said
    from jaxstack.data.streams import import_chat

    assert import_chat() is not None


def use_tracker(folder: Path, name: str) -> None:
    os.environ |= {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": str((folder / "mlruns").resolve().as_uri()),
    }
    from jaxstack.observe.trackers import TRACKERS

    tracker = TRACKERS[name](folder, 0, "run", {"train": {"steps": 2}})
    tracker.log(1, {"loss": 2.5})
    tracker.close()


def use_tune(folder: Path) -> None:
    study = folder / "study.yaml"
    study.write_text("trials: 1\nspace:\n  optimizer.learning_rate: {low: 1.0e-4, high: 3.0e-2, log: true}\n")
    config = ROOT / "configs/quickstart.yaml"
    place = [f"run.dir={folder}", "run.name=tuned"]
    jaxstack("tune", "--config", config, "--study", study, *SMALL, *text_in(folder), *place)


def use_docs(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q", "-d", folder / "site"], check=True, cwd=ROOT)


def use_eval(folder: Path) -> None:
    """Run a task of one question."""
    questions = folder / "questions.jsonl"
    questions.write_text(json.dumps({"question": "one", "choices": ["a", "b"], "answer": 0}) + "\n")
    task = {"task": "choose", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(questions)}}}
    task |= {"test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}"}
    task |= {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    (folder / "choose.yaml").write_text(json.dumps(task))
    said = jaxstack("evaluate", "--run", folder / "run", "--tasks", folder / "choose.yaml")
    assert "choose" in said and "acc" in said, said


def use_serve(folder: Path) -> None:
    """Ask a server for an answer with a constraint and for its metrics; end it by SIGTERM."""
    words = [sys.executable, "-m", "jaxstack.serve", "--run", folder / "run", "--port", "0", "engine.slots=1"]
    process = subprocess.Popen([*map(str, words), "engine.chunk=16"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if found := re.match(r"serving .* at (\S+)", line):
            break
    else:
        raise SystemExit("".join(said))
    body = json.dumps({"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[0-9]{3}"}}).encode()
    request = urllib.request.Request(f"{found[1]}/v1/completions", body, {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["text"]
    metrics = urllib.request.urlopen(f"{found[1]}/metrics").read()
    process.send_signal(signal.SIGTERM)
    assert re.fullmatch("[0-9]{3}", answer) and b"vllm:" in metrics and process.wait() == 0


def use_export(folder: Path) -> None:
    for target in ("stablehlo", "onnx"):
        jaxstack("export", "--run", folder / "run", "--to", target, "--out", folder / target)


USES = {
    "data": use_data,
    "tune": use_tune,
    "docs": use_docs,
    "eval": use_eval,
    "serve": use_serve,
    "export": use_export,
}
USES |= {name: lambda folder, name=name: use_tracker(folder, name) for name in ("wandb", "mlflow")}

if __name__ == "__main__":
    what, where = sys.argv[1:]
    if what == "requirements":
        print("\n".join(requirements(where)))
    elif what == "train":
        train(Path(where))
    else:
        USES[what](Path(where))
