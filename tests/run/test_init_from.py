"""Fine-tuning from a Hugging Face checkpoint on chats, and back: what a user does, by the commands."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxstack.generate as generate
from jaxstack import convert
from jaxstack.data.load_tokenizer import load_tokenizer
from jaxstack.decoding.text_stream import ChatGenerator
from jaxstack.models import from_huggingface
from jaxstack.run.load import load
from jaxstack.run.train import train
from jaxstack.run_config import load_config
from jaxstack.stored import StoredModel
from tests.stored.decoders import decoder_of
from tests.word_models import make_chat_model

WORDS = [*"abcdef", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "what", "is", "plus", "it"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 30, (2, 12)), jnp.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint as on the Hub, with a tokenizer of words and its chat template; chats; a configuration."""
    place = tmp_path_factory.mktemp("tuning")
    settings = {"bos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    source = make_chat_model(place / "qwen3", WORDS, **settings)
    chats = []
    for i in range(40):
        question = {"role": "user", "content": f"what is {WORDS[6 + i % 8]} plus {WORDS[i % 6]}"}
        answer = {"role": "assistant", "content": f"it is {WORDS[7 + i % 8]} {WORDS[i % 6]}"}
        chats.append(json.dumps({"messages": [question, answer]}))
    (place / "chats.jsonl").write_text("\n".join(chats))
    config = {
        "run": {"dir": str(place), "name": "tuned", "init_from": str(source)},
        "data": {
            "sources": [{"path": str(place / "chats.jsonl"), "format": "chat"}],
            "cache_dir": str(place / "cache"),
            "held_out_fraction": 0.3,
        },
        "train": {"steps": 4, "global_batch_size": 8, "sequence_length": 32},
        "schedule": {"name": "constant"},
        "optimizer": {"learning_rate": 0.02},
        "adapters": {"rules": [{"path": "attention", "rank": 4}, {"path": "mlp", "method": "dora", "rank": 2}]},
        "parallel": {"fsdp": 4, "data": 2},
        "checkpoint": {"every_steps": 2},
        "observe": {"trackers": ["jsonl"], "log_every": 1, "progress": False},
    }
    (place / "tune.yaml").write_text(json.dumps(config))
    return place


@pytest.fixture(scope="module")
def tuned(folder) -> dict:
    return dict(train(load_config(folder / "tune.yaml")).metrics)


def test_the_run_learns_and_its_checkpoint_has_moments_of_adapters_only(folder, tuned):
    metrics = [json.loads(line) for line in (folder / "tuned" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in metrics if "loss" in line]
    assert losses[-1] < losses[0] and tuned["eval_loss"] > 0


def test_a_stopped_run_goes_on_exactly(folder, tuned):
    other = ["run.name=stopped", "train.steps=2"]
    train(load_config(folder / "tune.yaml", other))
    resumed = train(load_config(folder / "tune.yaml", ["run.name=stopped"])).metrics
    assert resumed["loss"] == tuned["loss"] and resumed["eval_loss"] == tuned["eval_loss"]


def test_the_export_is_a_plain_checkpoint_that_computes_the_same(folder, tuned):
    assert convert.main([str(folder / "tuned"), "--output", str(folder / "exported")]) == 0
    merged = from_huggingface(folder / "exported")(TOKENS)
    decoder = decoder_of(folder / "tuned")
    step = StoredModel.open(folder / "tuned").choose_step(None)
    assert step == 4
    np.testing.assert_allclose(decoder.module.merge(decoder.params, decoder.non_params)(TOKENS), merged, atol=1e-5)
    before = from_huggingface(folder / "qwen3")(TOKENS)
    assert float(jnp.abs(before - merged).max()) > 1e-3
    assert not any("adapter" in name for name in (p.name for p in (folder / "exported").iterdir()))
    written = json.loads((folder / "exported" / "tokenizer_config.json").read_text())
    ids = load_tokenizer(folder / "tuned" / "tokenizer").special_tokens
    assert written["chat_template"] == TEMPLATE
    assert json.loads((folder / "exported" / "config.json").read_text())["eos_token_id"] == ids["<|im_end|>"]


@pytest.mark.exhaustive
def test_transformers_loads_the_export(folder, tuned):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    output = folder / "for-transformers"
    assert convert.main([str(folder / "tuned"), "--output", str(output)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(output)
    with torch.no_grad():
        logits = model(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    np.testing.assert_allclose(logits, from_huggingface(output)(TOKENS), atol=1e-4)
    text = transformers.AutoTokenizer.from_pretrained(output).apply_chat_template(
        [{"role": "user", "content": "what is one"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user what is one<|im_end|><|im_start|>assistant "


def test_a_run_may_start_from_what_another_tuned(folder, tuned):
    again = ["run.name=again", f"run.init_from={folder / 'tuned'}", "train.steps=1", "optimizer.learning_rate=1e-12"]
    found = train(load_config(folder / "tune.yaml", again)).metrics
    assert found["eval_loss"] == pytest.approx(tuned["eval_loss"], rel=1e-5)


def test_a_question_is_asked_by_the_template(folder, tuned, capsys):
    ask = ["--run", str(folder / "tuned"), "--chat", "--prompt", "what is one plus one", "--temperature", "0"]
    assert generate.main([*ask, "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("what is one plus one\n")
    generator = load(folder / "tuned").text_generator()
    chat = ChatGenerator(generator)
    ids = generator.tokenizer.special_tokens
    assert chat.encode("what is one")[0] == ids["<|im_start|>"] and chat.encode("one")[-1] == 2
    assert chat.stop_tokens >= {ids["<|im_end|>"], ids["<|endoftext|>"]}
