"""The documentation is true: its Python runs, its commands and keys parse, its tables and links are complete."""

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest
import yaml
from flax import nnx
from pydantic import BaseModel

from jaxstack.__main__ import COMMANDS
from jaxstack.config.base import Component
from jaxstack.data.device_batches import abstract_batch
from jaxstack.local_sgd import METHODS
from jaxstack.models import ModelConfig, Transformer, count_parameters, preset_names
from jaxstack.models.attention import ATTENTION_KINDS
from jaxstack.models.attention.block_sparse import BlockSparseAttention
from jaxstack.models.moe.router import MoEConfig
from jaxstack.models.recurrent import GatedDelta, KimiDelta, StateSpace
from jaxstack.observe.what_ran import summarise_program
from jaxstack.optim.optimizers import OPTIMIZERS
from jaxstack.optim.schedules import SCHEDULES
from jaxstack.parameter_paths import path_name
from jaxstack.reinforce.rewards import REWARDS
from jaxstack.run.build import make_trainer, resolve_model
from jaxstack.run_config import RunConfig, config_from_tree, load_config
from jaxstack.tune import __main__ as tune
from pallas_kernels import record_choices
from scripts.pages import performance
from scripts.pages.row_tables import rows_page

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SECTIONS = RunConfig.model_fields
BY_NAME = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "local_sgd": METHODS, "reward": REWARDS}


def by_name(paths: list[Path]) -> Any:
    return pytest.mark.parametrize("path", paths, ids=[path.name for path in paths])


def blocks(path: Path, language: str) -> list[tuple[int, str]]:
    """(first line, text) of each fenced block of a language; "" means without a language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    return [(match.string.count("\n", 0, match.start()) + 2, match[1]) for match in found]


# --- Python -----------------------------------------------------------------------------------------------------------

GIVEN = {
    "checkpoints.md": """
        import jax, jax.numpy as jnp
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        state = {"params": jax.device_put(jnp.ones(4), sharding)}
        shardings = {"params": sharding}
    """,
    "data.md": """
        import jax
        from jaxstack.parallel import make_mesh
        sharding = jax.sharding.NamedSharding(make_mesh(), jax.P("data"))
    """,
    "kernels.md": """
        import jax, jax.numpy as jnp
        q = k = v = jnp.ones((1, 16, 2, 8))
        segment_ids = labels = jnp.ones((1, 16), jnp.int32)
        rows, matrices, group_sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 8)), jnp.array([2, 4])
        hidden, output_weight = jnp.ones((1, 16, 4)), jnp.ones((4, 16))
        step, state, batch = lambda state, batch: state + batch, 1.0, 2.0
    """,
    "observe.md": """
        import jax, pathlib
        from jaxstack.parallel import make_mesh
        step, state, batch, mesh = lambda state, batch: state + batch, 1.0, 2.0, make_mesh()
        pathlib.Path("runs/my-run").mkdir(parents=True)
    """,
    "plan.md": f"""
        import pathlib, shutil
        pathlib.Path("benchmarks/results").mkdir(parents=True)
        shutil.copy({str(ROOT / "benchmarks" / "results" / "learned_cost.jsonl")!r}, "benchmarks/results")
    """,
    "training.md": """
        import pathlib
        pathlib.Path("runs/quickstart").mkdir(parents=True)
        pathlib.Path("runs/quickstart/metrics.jsonl").write_text('{"step": 1, "eval_loss": 2.0}')
    """,
}
"""What a page's blocks take as given: the reader's own step, state, mesh or run."""


class _OneRound(ast.NodeTransformer):
    """Loops over batches never end: a `for` whose body is `...` is left after one round."""

    def visit_For(self, node: ast.For) -> ast.For:
        if isinstance(node.body[-1], ast.Expr) and isinstance(node.body[-1].value, ast.Constant):
            node.body[-1] = ast.Break()
        return ast.fix_missing_locations(node)


STANDALONE = ("kernels.md",)
"""Pages whose sections stand by themselves; all others are read from the top."""


LONG = {
    "library.md": ("exhaustive",),
    "finetuning.md": ("longer",),
    "generation.md": ("longer",),
    "evaluation.md": ("longer",),
    "serving.md": ("longer",),
    "kernels.md": ("longer",),
    "kernels.md: gated_delta_rule": ("longer",),
    "kernels.md: grouped_matmul": ("longer",),
    "kernels.md: longformer_attention, block_sparse_attention": ("longer",),
    "kernels.md: ssd": ("longer",),
    "kernels.md: update_states": ("longer",),
    "posttraining.md": ("longer",),
    "kernels.md: linear_attention, performer_attention": ("longer",),
    "huggingface.md": ("longer",),
    "precision.md": ("longer",),
}
"""Pages and sections whose blocks run for seconds -> their marks."""


def python_units() -> Iterator[Any]:
    """A page, or a section of one of `STANDALONE`, with its blocks, for each test."""
    for path in TEXTS:
        sections: dict[str, list[tuple[int, str]]] = {}
        lines = path.read_text(encoding="utf-8").splitlines()
        for line, text in blocks(path, "python"):
            titles = [title.strip("# ") for title in lines[:line] if re.match("##+ ", title)]
            name = f"{path.name}: {titles[-1]}" if titles and path.name in STANDALONE else path.name
            sections.setdefault(name, []).append((line, text))
        for name, code in sections.items():
            yield pytest.param(path, code, id=name, marks=[getattr(pytest.mark, mark) for mark in LONG.get(name, ())])


@pytest.mark.parametrize(("path", "code"), python_units())
def test_python_blocks_run(path, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "documentation"}
    given = "\n".join(line.strip() for line in GIVEN.get(path.name, "").splitlines())
    exec(given, names)
    for line, text in code:
        tree = _OneRound().visit(ast.parse("\n" * (line - 1) + text, str(path)))
        exec(compile(tree, str(path), "exec"), names)


# --- commands and keys ------------------------------------------------------------------------------------------------


def written(path: Path) -> str:
    """The page without its Python, and without the sessions (`$ command` and what it prints) that show a mistake."""
    text = re.sub(r"^```python\n.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"^```\n\$.*?^```", "", text, flags=re.M | re.S).replace("\\\n", "")


def commands(text: str) -> list[list[str]]:
    """Every `python -m jaxstack.NAME ...` as its words; optional parts in brackets, `...` and redirections left out."""
    found = re.findall(r"python -m (jaxstack\.\w+[^`\n]*)", text)
    words = [shlex.split(re.sub(r"\s\[[^]]*\](?=\s|$)|\s\.\.\.|\s[>#|;&].*", "", line), posix=True) for line in found]
    return [line for line in words if len(line) > 1]


def parser_of(name: str) -> Any:
    return COMMANDS[name].load().make_parser()


def check_command(words: list[str]) -> None:
    name, *arguments = words
    name = name.removeprefix("jaxstack.")
    parser = parser_of(name)
    if name == "tune":
        parser = tune.make_parser(arguments)
        arguments = arguments[arguments[0] in tune.SUBCOMMANDS :]
    if name not in ("train", "reinforce", "plan", "tune"):
        intermixed = name in ("generate", "evaluate", "serve")
        parser.parse_intermixed_args(arguments) if intermixed else parser.parse_args(arguments)
        return
    parsed = parser.parse_intermixed_args(arguments)
    config = ROOT / parsed.config
    if parsed.config.startswith("configs/"):
        assert config.is_file(), f"{parsed.config} does not exist"
    if parsed.config != "FILE":
        load_config(config if config.is_file() else None, parsed.overrides)


@by_name([*TEXTS, *CONFIGS])
def test_commands_parse(path):
    for words in commands(written(path)):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                check_command(words)
            except (SystemExit, ValueError, AttributeError) as error:
                pytest.fail(f"{path.name}: {shlex.join(words)}: {said.getvalue() or error}")


@by_name(TEXTS)
def test_scripts_and_modules_that_commands_run_exist(path):
    text = re.sub(r"git checkout \w+ && python \S+", "", path.read_text(encoding="utf-8"))  # at another commit
    for file in re.findall(r"(?<![\w./-])python ((?:scripts|benchmarks|docs)/[\w/]+\.py)", text):
        assert (ROOT / file).is_file() or Path(file).stem == "NAME", f"{path.name}: {file}"
    for name in re.findall(r"python -m ((?:jaxstack|pallas_kernels)[\w.]*)", text):
        assert importlib.util.find_spec(name) is not None, f"{path.name}: {name}"
    for name in re.findall(r"`jaxstack ([a-z]+)", "" if path.name == "performance-rows.md" else text):
        assert name in COMMANDS, f"{path.name}: jaxstack {name}"
    for extra in re.findall(r"jaxstack\[(\w+)\]|'\.\[(\w+)\]'", text):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert "".join(extra) in project["optional-dependencies"], f"{path.name}: {extra}"


def test_files_and_tables_that_the_architecture_names_exist():
    """A file is the end of a path of the package or of `scripts`, however short the page names it."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`([\w/]+\.(?:py|json|yaml))`", text) if not re.search("[A-Z]{4}", name)}
    folders = ("jaxstack", "pallas_kernels", "configs", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert len(named) > 100
    assert [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in files)] == []
    code = "\n".join(path.read_text(encoding="utf-8") for path in files if path.suffix == ".py")
    tables = set(re.findall(r"`([A-Z][A-Z_]+)`", text))
    assert len(tables) > 20
    assert [name for name in tables if not re.search(rf"^{name}\b.* = ", code, re.M)] == []


def test_notebook_commands_parse():
    notebook = json.loads((ROOT / "docs" / "first_hour.ipynb").read_text(encoding="utf-8"))
    lines = "".join("".join(cell["source"]) + "\n" for cell in notebook["cells"]).replace("\\\n", "")
    found = commands(lines)
    assert len(found) == 4
    for words in found:
        check_command(words)


@by_name([path for path in TEXTS if "```\n$ " in path.read_text(encoding="utf-8")])
def test_shown_sessions_are_real(path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for session in re.findall(r"^```\n\$ python -m (.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S):
        command, expected = session.split("\n", 1)
        module, *arguments = shlex.split(command)
        assert importlib.import_module(module).main(arguments) == 2
        assert capsys.readouterr().err == expected


def quickstart_choices() -> list[dict[str, str]]:
    """What the step of the quick start takes for its operations, without compiling it."""
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    config = config.model_copy(update={"model": resolve_model(config.model, 4096)})
    trainer = make_trainer(config, lambda step: {}, jax.devices()[:1])
    rows = np.zeros((config.train.global_batch_size, config.train.sequence_length), np.int32)
    batch = abstract_batch(dict.fromkeys(("tokens", "labels", "segment_ids"), rows), trainer.rules, len(rows))
    with jax.set_mesh(trainer.rules.mesh), record_choices() as choices:
        jax.eval_shape(trainer.steps.train_step, trainer.abstract_state, batch)
    return [{"operation": choice.operation, "backend": choice.backend} for choice in choices]


def test_shown_runs_name_the_kernels_of_the_quick_start():
    named = summarise_program({"kernels": quickstart_choices()})
    assert named.startswith("flash_attention: ")
    for path in (ROOT / "README.md", ROOT / "docs" / "first_hour.ipynb"):
        shown = re.findall(r"compiled the step in [\d.]+ s; ([^=]*?);\s+[\d.]+ GiB", path.read_text(encoding="utf-8"))
        assert shown and all(re.sub(r"\s+", " ", text) == named for text in shown), f"{path.name}: {named}"


def keys_of(section: str) -> set[str]:
    parts = BY_NAME.get(section) or (SECTIONS[section].annotation,)
    return {field.alias or name for part in parts for name, field in part.model_fields.items()}


@by_name([*TEXTS, *CONFIGS])
def test_named_keys_exist(path):
    for name in re.findall(rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})\.[a-z]\w*(?![\w(/])", written(path)):
        section, key = name.split(".")
        if key not in ("md", "py", "json", "jsonl", "yaml", "safetensors", "onnx"):
            assert key in keys_of(section), f"{path.name}: there is no {name}"


@by_name([path for path in TEXTS if blocks(path, "yaml")])
def test_yaml_blocks_are_configurations(path):
    for line, text in blocks(path, "yaml"):
        try:
            config_from_tree(yaml.safe_load(text))
        except Exception as error:
            pytest.fail(f"{path.name}, line {line}: {error}")


@by_name(CONFIGS)
def test_configs_load_and_open_with_their_command(path):
    command = "train" if load_config(path).policy.loss is None else "reinforce"
    assert path.read_text().startswith(f"# python -m jaxstack.{command} --config configs/{path.name}\n")


# --- tables -----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def sections_of(path: Path) -> dict[str, str]:
    parts = re.split(r"^## (\w+)$", path.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("section", SECTIONS)
def test_configuration_page_has_every_key_with_its_default(section):
    text = sections_of(ROOT / "docs" / "configuration.md")[section]
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", text, re.M))
    if section in BY_NAME:
        for part in BY_NAME[section]:
            start = f"| `{part.model_fields['name'].default}` |"
            row = next(line for line in text.splitlines() if line.startswith(start))
            common = {"name", "learning_rate", "weight_decay", "clip_norm", "groups", "balance_rate", "warmup_steps"}
            common |= {"every", "synchronous_steps", "weight"}
            for name, field in part.model_fields.items():
                assert name in common or f"`{field.alias or name}`" in row, f"{part.__name__}.{name}"
        return
    component = SECTIONS[section].annotation
    assert isinstance(component, type) and issubclass(component, Component)
    expected = {field.alias or name: plain(field.default) for name, field in component.model_fields.items()}
    assert {name: yaml.safe_load(default) for name, default in rows.items()} == expected


@pytest.mark.parametrize(
    ("part", "kind"), [("moe", MoEConfig), ("delta", GatedDelta), ("kda", KimiDelta), ("ssd", StateSpace)]
)
def test_configuration_page_has_every_key_of_a_mixture_and_of_recurrent_layers(part, kind):
    text = sections_of(ROOT / "docs" / "configuration.md")["model"]
    rows = dict(re.findall(rf"^\| `{part}\.(\w+)` \| (?:`([^`]+)`|\(needed\)) \|", text, re.M))
    fields = {name: field for name, field in kind.model_fields.items() if name != "name"}
    assert rows.keys() == fields.keys()
    for name, field in fields.items():
        assert field.is_required() or yaml.safe_load(rows[name]) == plain(field.default), name


def test_configuration_page_has_every_attention_kind_with_its_keys():
    text = sections_of(ROOT / "docs" / "configuration.md")["model"]
    for part in (*ATTENTION_KINDS, *get_args(BlockSparseAttention.model_fields["pattern"].annotation)):
        start = f"| `{part.model_fields['name'].default}` |"
        row = next(line for line in text.splitlines() if line.startswith(start))
        for name, field in part.model_fields.items():
            shown = field.default.name if isinstance(field.default, BaseModel) else plain(field.default)
            text_of = yaml.safe_dump(shown).splitlines()[0]
            assert name == "name" or f"`{name}` {text_of}" in row, f"{part.__name__}.{name}"


def test_models_page_has_every_preset_with_its_size():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = {row[0]: tuple(int(n.replace(",", "")) for n in row[1:]) for row in re.findall(
        r"^\| `([\w.-]+)` \| ([\d,]+) \| (\d+) \| (\d+) \| (\d+) / (\d+) \|", text, re.M
    )}  # fmt: skip
    assert sorted(rows) == preset_names()
    for name, row in rows.items():
        model = load_config(None, [f"model.preset={name}"]).model
        model = model.model_copy(update={"vocab_size": model.vocab_size or 4096})
        shape = (model.num_layers, model.hidden_size, model.num_heads, model.kv_heads)
        assert row == (count_parameters(model).total, *shape), name


# --- pages ------------------------------------------------------------------------------------------------------------


@by_name(TEXTS)
def test_links_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([\w-]+))?\)", path.read_text(encoding="utf-8")):
        page = path.parent / target if target else path
        assert page.exists(), f"{path.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], anchor


def test_index_lists_every_page():
    listed = re.findall(r"\]\((\w[\w-]*\.md)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in PAGES if path.name != "index.md")


ROW = {"work": "w", "implementation": "jaxstack", "device": "d", "devices": 1, "command": "python x.py", "commit": "c"}


def test_page_of_rows_shows_the_newest_row_of_each(tmp_path):
    old = {**ROW, "milliseconds": 5, "date": "2026-01-01T00:00"}
    new = {**ROW, "milliseconds": 4.25, "date": "2026-01-02T00:00"}
    peer = {**ROW, "implementation": "peer 1.0", "date": "2026-01-01T00:00", "mfu": 0.5}
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, (new, old, peer))))
    page = rows_page(tmp_path)
    table = page[page.index("## bench") :]
    assert table.count("python x.py") == 2 and "| 4.25 |" in table and "| 50.0 % |" in table


@pytest.mark.parametrize("change", [{"commit": "c-dirty"}, {"commit": None}, {"uncommitted": ["a.py"]}])
def test_rows_of_uncommitted_files_are_not_shown(tmp_path, change):
    row = {**ROW, "milliseconds": 5, "date": "2026-01-01T00:00", **change}
    (tmp_path / "bench.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "work": "kept", "note": "why"}))
    page = rows_page(tmp_path)
    assert page.count("python x.py") == 1 and "kept" in page and "with changes" in page


def test_ours_is_compared_with_the_fastest_peer_of_the_same_run(tmp_path):
    rate = "tokens_per_second_per_device"
    work = "gpt2-124m bf16"
    ours = {**ROW, "work": work, rate: 120.0, "date": "2026-01-01T00:00", "run": "1", "measured_seconds": 30.0}
    peers = [{**ours, "implementation": f"peer {speed}", rate: float(speed)} for speed in (80, 100)]
    later = {**ours, rate: 150.0, "date": "2026-01-02T00:00", "run": "2"}
    short = {**ours, rate: 200.0, "date": "2026-01-03T00:00", "run": "3", "measured_seconds": 5.0}
    limit = {**ROW, "work": work, "implementation": "limit", rate: 240.0, "date": "2026-01-01T00:00"}
    (tmp_path / "train_step.jsonl").write_text("\n".join(map(json.dumps, (ours, *peers, later, short))))
    (tmp_path / "device.jsonl").write_text(json.dumps(limit))
    (found,) = performance.comparisons(tmp_path)
    assert (found.ours[rate], found.peer[rate], found.ratio, found.limit_fraction) == (120.0, 100.0, 1.2, 0.5)
    page = performance.make_page(tmp_path)
    assert "| 120 | 100 (peer 100) | 1.20 | 1.25 | 50 % | sustained" in page
    assert "1.20 of 1.25; the goal is 52 % of the device's limit" in page
    assert set(performance.make_pictures(tmp_path)) == {"speed.svg", "limit.svg"}


@pytest.mark.parametrize("kind", ["delta", "kda", "ssd"])
def test_fine_tuning_page_names_the_weights_of_recurrent_layers(kind):
    text = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `{kind}`"))
    config = ModelConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=1, layer_types=(kind,))
    state = nnx.state(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))), nnx.Param)
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    found = {path.split("/")[-2] for path in paths if "/attention/" in path and path.endswith("/kernel")}
    assert found == set(re.findall(r"`(\w+proj\w*)`", row))
