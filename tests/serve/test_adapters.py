"""Adapters of one model, whose requests are computed in the same steps: texts are those of the merged model alone."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.rows import Column
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.step import StepVariant
from jaxstack.errors import ConfigError
from jaxstack.models.adapter_stack import AdapterMatrices, LowRank
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from jaxstack.parallel.packed_weights import place_packed
from jaxstack.parameter_paths import flatten, nest
from jaxstack.serve.config import EngineConfig
from jaxstack.serve.engine import open_engine
from pallas_kernels import Grid, PackedWeight
from pallas_kernels.weight_only.packed import pack_lookup, pack_nearest
from tests.serve.test_http import COMPLETE, LIMITS, ask, listen
from tests.serve.tiny import CONFIG, open_tiny

LAYERS = ("attention/q_proj", "attention/v_proj", "attention/o_proj", "mlp/gate_proj", "mlp/down_proj")
PROMPTS = [[256, *b"def add"], [256, *b"import "], [256, *(b"a longer text " * 9)]]
SIZES = EngineConfig(slots=4, page_size=8, chunk=64, adapters=2, adapter_rank=4)


def kernels() -> dict[str, np.ndarray]:
    """The matrices of the tiny model, by the path of their layer."""
    params = flatten(open_tiny().params)
    return {"/".join(path[:-1]): np.asarray(x) for path, x in params.items() if path[-1] == "kernel"}


def make_adapter(seed: int, rank: int = 2) -> AdapterMatrices:
    """Random matrices that change the texts of the tiny model."""
    key = np.random.default_rng(seed)
    found = {}
    for path, kernel in kernels().items():
        if path.endswith(LAYERS):
            cut = kernel.ndim - 1 if path.endswith("o_proj") else 1
            a = key.normal(size=(*kernel.shape[:cut], rank)) / kernel.shape[0] ** 0.5
            found[path] = LowRank(a.astype(np.float32), key.normal(size=(rank, *kernel.shape[cut:])).astype(np.float32))
    assert len(found) == len(LAYERS)
    return found


def merged_texts(
    adapter: AdapterMatrices | None, prompts=PROMPTS, count: int = 12, kernels: Mapping[str, jax.Array] | None = None
) -> list[list[int]]:
    """The greedy answers of the model (with other matrices) with the adapter merged into its weights, each alone."""
    decoder = open_tiny()
    params = flatten(decoder.params) | {(*path.split("/"), "kernel"): x for path, x in (kernels or {}).items()}
    for path, (a, b) in (adapter or {}).items():
        key = (*path.split("/"), "kernel")
        params[key] = params[key] + jnp.tensordot(a, b, 1)
    decoder.load(nest(params.items()), decoder.non_params)
    config = SIZES.model_copy(update={"adapters": 0, "slots": 1})
    with Engine(decoder, config, warm_up=False) as engine:
        return [engine.submit(prompt, count, Sampling(0)).result() for prompt in prompts]


@pytest.mark.longer
def test_texts_of_several_adapters_in_one_step_are_those_of_the_merged_models():
    adapters = {"first": make_adapter(1), "second": make_adapter(2, rank=4)}
    wanted = {None: merged_texts(None), **{name: merged_texts(found) for name, found in adapters.items()}}
    assert len({str(texts) for texts in wanted.values()}) == 3
    with Engine(open_tiny(), SIZES) as engine:
        compiled = engine.programs.compiled
        engine.load_adapter("first", adapters["first"])
        running = engine.submit(PROMPTS[0], 12, Sampling(0), adapter="first")
        engine.load_adapter("second", adapters["second"])
        for _ in range(2):  # the second time with cached prefixes
            asked = [(name, prompt) for prompt in PROMPTS for name in wanted]
            found = [engine.submit(prompt, 12, Sampling(0), adapter=name) for name, prompt in asked]
            for (name, prompt), request in zip(asked, found, strict=True):
                assert request.result() == wanted[name][PROMPTS.index(prompt)], (name, prompt)
        assert running.result() == wanted["first"][0] and engine.scheduler.prefix_hits > 0
        assert engine.programs.compiled == compiled
        with pytest.raises(ConfigError, match="there is no adapter 'third'"):
            engine.submit(PROMPTS[0], 2, adapter="third")


@pytest.mark.longer
def test_a_place_is_free_again_when_the_requests_of_its_adapter_have_ended():
    """Nothing of the adapter that was there before is left, in the weights or in cached prefixes."""
    old, new = make_adapter(1), make_adapter(3)
    new = {path: matrices for path, matrices in new.items() if "mlp" in path}
    with Engine(open_tiny(), SIZES.model_copy(update={"adapters": 1}), warm_up=False) as engine:
        engine.load_adapter("old", old)
        with pytest.raises(ConfigError, match="an adapter 'old' is loaded already"):
            engine.load_adapter("old", old)
        running = engine.submit(PROMPTS[2], 100, Sampling(0), adapter="old")
        engine.unload_adapter("old")
        with pytest.raises(ConfigError, match=r"all 1 places of adapters .* unfinished requests"):
            engine.load_adapter("new", new)
        assert running.result()[:12] == merged_texts(old)[2]
        engine.load_adapter("new", new)
        texts = [engine.submit(prompt, 12, Sampling(0), adapter="new").result() for prompt in PROMPTS]
        assert texts == merged_texts(new) and engine.adapters.names == ["new"]


@pytest.mark.longer
def test_guesses_from_earlier_text_change_no_answer_with_an_adapter():
    wanted = merged_texts(make_adapter(1), count=40)
    drafting = SIZES.model_copy(update={"draft_tokens": 3, "drafts": "always"})
    with Engine(open_tiny(), drafting, warm_up=False) as engine:
        engine.load_adapter("first", make_adapter(1))
        found = [engine.submit(prompt, 40, Sampling(0), adapter="first") for prompt in PROMPTS]
        assert [request.result() for request in found] == wanted and engine.stats.draft_tokens > 0


def pack(kernel: np.ndarray, contracted: int, bits: int | None) -> PackedWeight:
    """Pack a matrix as integers of so many bits, or (None) as indices of a table, the form of MXFP4's values."""
    cut = kernel.shape[:contracted], kernel.shape[contracted:]
    matrix = jnp.asarray(kernel).reshape(math.prod(cut[0]), -1).T
    if bits is not None:
        return pack_nearest(Grid(bits, 16), matrix).with_dims(*cut)
    table = jnp.linspace(-1, 1, 16) * abs(matrix).max()
    return pack_lookup(4, abs(matrix[..., None] - table).argmin(-1), table[None]).with_dims(*cut)


def open_on(data: int = 1, tensor: int = 1, packed: Callable[[np.ndarray, int], PackedWeight] | None = None) -> Decoder:
    """Open the tiny model on a mesh, with its matrices packed if there is a function for it."""
    plain = open_tiny()
    rules = make_rules(make_mesh(ParallelConfig(data=data, tensor=tensor), jax.devices()[: data * tensor]))
    specs = flatten(plain.module.parameter_specs(rules))
    params = {}
    for path, x in flatten(plain.params).items():
        sharding = rules.sharding(specs[path])
        if packed is not None and path[-1] == "kernel":
            params[path] = place_packed(packed(np.asarray(x), 2 if path[-2] == "o_proj" else 1), sharding)
        else:
            params[path] = jax.device_put(np.asarray(x), sharding)
    non_params = jax.device_put(plain.non_params, rules.sharding(jax.P()))
    return Decoder(plain.module, nest(params.items()), non_params, rules)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("degrees", "bits", "changes"),
    [
        ({"tensor": 2}, 0, {}),
        ({"tensor": 2}, 0, {"draft_tokens": 3, "drafts": "always"}),
        ({"tensor": 2}, 0, {"half_batches_from": 2}),
        ({"data": 2}, 0, {}),
        ({}, 4, {}),
        ({}, None, {"draft_tokens": 3, "drafts": "always"}),
        ({"tensor": 2}, 8, {}),
    ],
    ids=["tensor", "tensor_drafts", "tensor_halves", "replicas", "int4", "table_drafts", "tensor_int8"],
)
def test_adapters_are_served_on_meshes_on_packed_weights_and_with_guesses(degrees, bits, changes):
    """With the texts of the models that they are merged into; packed weights (bits 0: plain) are unpacked for that."""
    packed = None if bits == 0 else partial(pack, bits=bits)
    adapter = make_adapter(1)
    dense = (
        None
        if packed is None
        else {path: packed(x, 2 if "o_proj" in path else 1).dense() for path, x in kernels().items()}
    )
    wanted = {None: merged_texts(None, kernels=dense), "first": merged_texts(adapter, kernels=dense)}
    with open_engine(open_on(**degrees, packed=packed), SIZES.model_copy(update=changes), warm_up=False) as engine:
        engine.load_adapter("first", adapter)
        found = {name: [engine.submit(prompt, 12, Sampling(0), adapter=name) for prompt in PROMPTS] for name in wanted}
        assert {name: [request.result() for request in requests] for name, requests in found.items()} == wanted


@pytest.mark.longer
def test_steps_without_adapters_do_not_multiply_with_their_places():
    """The engine has programs for both, and chooses by the adapters of the rows of a step."""
    flops = []
    for adapters in (0, 2):
        sizes = SIZES.model_copy(update={"adapters": adapters})
        with Engine(open_tiny(), sizes, warm_up=False, start=False) as engine:
            programs = engine.programs
            rows = programs.table.describe([], 4)
            arguments = (programs.model.params, programs.model.non_params, programs._last, rows, None, None, None)
            for adapted in (False, True)[: 1 + bool(adapters)]:
                step = partial(programs._forward_step, variant=StepVariant(adapted=adapted))
                cost = jax.jit(step).lower(*arguments, pages=programs._pages).cost_analysis()
                assert cost is not None
                flops.append(cost["flops"])
            assert not programs._is_adapted(rows)
            rows[1, Column.ADAPTER] = 2
            assert programs._is_adapted(rows) == (adapters > 0)
    assert flops[0] == flops[1] < flops[2]


def test_stacked_layers_are_refused():
    config = CONFIG.model_copy(update={"num_layers": 2, "scan_layers": True})
    with pytest.raises(ConfigError, match="adapters are served with unrolled layers only"):
        Engine(open_tiny(config=config), SIZES, warm_up=False, start=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path, a, b: (path, np.zeros((*a.shape[:-1], 5)), np.zeros((5, *b.shape[1:]))), "engine.adapter_rank=5"),
        (lambda path, a, b: (path, a[:-1], b), "where this model needs"),
        (lambda path, a, b: (path + "x", a, b), "which is no dense layer of this model"),
        (lambda path, a, b: (path, a * np.nan, b), "holds NaN or infinity"),
    ],
)
def test_adapters_that_do_not_fit_are_told_why(change, message):
    path, matrices = next(iter(make_adapter(1).items()))
    name, a, b = change(path, *matrices)
    with Engine(open_tiny(), SIZES, warm_up=False, start=False) as engine:
        with pytest.raises(ConfigError, match=message):
            engine.load_adapter("wrong", {name: LowRank(a, b)})
        assert engine.adapters.names == [] and jax.tree.leaves(engine.model.params)


@pytest.mark.longer
def test_adapters_are_models_of_the_server(tmp_path):
    """Asked for by OpenAI's client; loaded and unloaded by vLLM's routes, below one folder only."""
    openai = pytest.importorskip("openai")
    folder = tmp_path / "adapters"
    (folder / "b").mkdir(parents=True)
    config = LIMITS.model_copy(update={"adapter_folder": str(folder)})
    read = {folder / "b": make_adapter(2)}
    with Engine(open_tiny(), SIZES, vocab_size=257, stop_tokens=[256], warm_up=False) as engine:
        engine.load_adapter("first", make_adapter(1))
        server, port = listen(engine, config, read_adapter=read.__getitem__)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        load = {"lora_name": "second", "lora_path": "b"}
        assert ask(port, "/v1/load_lora_adapter", load)[0] == 200
        assert {m.id: m.parent for m in client.models.list()} == {"tiny": None, "first": "tiny", "second": "tiny"}
        options = {"prompt": "def add", "max_tokens": 12, "temperature": 0, "extra_body": {"return_token_ids": True}}
        for name, seed in (("tiny", None), ("first", 1), ("second", 2)):
            wanted = merged_texts(None if seed is None else make_adapter(seed), PROMPTS[:1])[0]
            found = client.completions.create(model=name, **options)
            assert found.choices[0].token_ids == wanted[: len(found.choices[0].token_ids)] and found.model == name
        messages = [{"role": "user", "content": "Hello"}]
        assert client.chat.completions.create(model="second", messages=messages, max_tokens=4).model == "second"
        assert client.responses.create(model="second", input="Hello", max_output_tokens=4).model == "second"
        for path, body, status, message in (
            ("load", load, 400, "is loaded already"),
            ("load", load | {"lora_name": "tiny"}, 400, "is the name of the model"),
            ("load", load | {"lora_path": str(tmp_path)}, 400, "a directory below server.adapter_folder"),
            ("load", load | {"lora_path": "../adapters/c"}, 400, "a directory below server.adapter_folder"),
            ("load", load | {"lora_path": "c\0"}, 400, "a directory below server.adapter_folder"),
            ("load", load | {"lora_path": "c" * 300}, 400, "a directory below server.adapter_folder"),
            ("unload", {"lora_name": "third"}, 404, "this server has 'tiny' and 'first' and 'second'"),
        ):
            found, answer, _ = ask(port, f"/v1/{path}_lora_adapter", body)
            assert found == status and message in answer["error"]["message"]
        assert ask(port, "/v1/embeddings", {"input": "a", "model": "first"})[0] == 400
        assert ask(port, "/v1/unload_lora_adapter", {"lora_name": "second"})[0] == 200
        assert ask(port, COMPLETE, {"prompt": "a", "model": "second"})[0] == 404
        server.should_exit = True
