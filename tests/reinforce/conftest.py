"""What runs of reinforcement learning start from: a checkpoint with a tokenizer, prompts, a configuration."""

import json
from pathlib import Path

import pytest

from tests.word_models import make_chat_model

WORDS = [*"abcdef", "what", "is", "it", "yes", "no"]
GAME = """
import random

def add(x: int) -> int:
    return x + 1

class Game:
    def step(self, answer):
        return random.choice(["what", "is", "it"]), len(answer) % 3 + random.random(), random.random() < 0.3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint as on the Hub, with a tokenizer of words; prompts; a configuration."""
    place = tmp_path_factory.mktemp("reinforce")
    source = make_chat_model(place / "qwen3", WORDS)
    lines = [json.dumps({"prompt": f"what is {WORDS[i % 6]} {WORDS[i % 5]}", "wanted": "yes"}) for i in range(30)]
    (place / "prompts.jsonl").write_text("\n".join(lines))
    config = {
        "run": {"dir": str(place), "name": "grpo", "init_from": str(source)},
        "data": {
            "sources": [{"path": str(place / "prompts.jsonl"), "format": "prompt"}],
            "chat": {"template": "chatml"},
            "held_out_fraction": 0.2,
        },
        "reward": [{"name": "contains", "column": "wanted"}],
        "policy": {"loss": "grpo", "samples": 4, "overlong": "keep"},
        "rollout": {"prompts": 2, "max_tokens": 4, "engine": {"slots": 8, "page_size": 4}},
        "train": {"steps": 4, "sequence_length": 16},
        "schedule": {"name": "constant"},
        "optimizer": {"learning_rate": 0.01},
        "parallel": {"fsdp": 4, "data": 2},
        "checkpoint": {"every_steps": 2},
        "observe": {"trackers": ["jsonl"], "log_every": 1, "progress": False},
    }
    (place / "grpo.yaml").write_text(json.dumps(config))
    (place / "game.py").write_text(GAME)
    for name, content in (("plain", "m.content"), ("forgets", "m.content.split('</think>')[-1]")):
        turn = "'<|im_start|>' + m.role + ' ' + " + content + " + '<|im_end|>'"
        begin = "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
        (place / f"{name}.jinja").write_text("{% for m in messages %}{{ " + turn + " }}{% endfor %}" + begin)
    return place


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
