"""Chats: the text that templates write, which tokens are learnt, rows, and what is refused with file and line."""

import datetime
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jaxstack.data.chat_template import ChatError, choose_template
from jaxstack.data.config import ChatConfig, DataConfig, SourceConfig, TokenizerConfig
from jaxstack.data.load_tokenizer import load_tokenizer, read_tokenizer_file
from jaxstack.data.loader import open_data
from jaxstack.data.token_rows import pack
from jaxstack.errors import ConfigError, JaxstackError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "And caf\u00e9 \U0001f600?"},
    {"role": "assistant", "content": "A caf\u00e9 \U0001f600 is open."},
]
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' and not loop.first %}{% continue %}{% endif %}[{{ m.role | upper }}] {{ m.content | trim }}"
    "{{ eos_token }}{% endfor %}{{ strftime_now('%d %b %Y') if false }}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer as on the Hub: byte-level BPE, whose post-processor trims places, and a template."""
    place = tmp_path_factory.mktemp("tokenizer")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    model.post_processor = processors.ByteLevel(trim_offsets=True)  # type: ignore[assignment]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = [message["content"] for message in TALK] * 20
    model.train_from_iterator(text, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    model.add_special_tokens(SPECIAL)
    model.save(str(place / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    tokens = {"bos_token": "<|endoftext|>", "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": MARKED}))
    return place


@pytest.fixture
def opened(folder, tmp_path, cache):
    """Opens records, written to a file, as data."""

    def open_records(
        records, length=64, template="chatml", lines=None, held_out=0.0, packing=True, format="chat", more=None, **chat
    ):
        path = tmp_path / "chats.jsonl"
        path.write_text("\n".join(lines or [json.dumps(record) for record in records]) + "\n")
        config = DataConfig(
            sources=(SourceConfig(path=str(path), format=format),),
            tokenizer=TokenizerConfig(name="file", path=str(folder)),
            chat=ChatConfig(template=template, **chat),
            held_out_fraction=held_out,
            cache_dir=str(cache),
            packing=packing,
        )
        return open_data(config, sequence_length=length, seed=0, report=said.append, **more or {})

    said: list[str] = []
    open_records.said = said
    return open_records


def rows_of(data):
    return [data._rows[0].read(i) for i in range(data._rows[0].count)]


def learnt(data, row) -> list[str]:
    """The runs of labels that are learnt, as text with special tokens."""
    model = Tokenizer.from_str(data.tokenizer.tokenizer_json())
    cuts = np.flatnonzero(np.diff(row["labels"] != -100)) + 1
    runs = [part for part in np.split(row["labels"], cuts) if part[0] != -100]
    return [model.decode(part.tolist(), skip_special_tokens=False) for part in runs]


def test_chatml_is_written_and_its_answers_are_learnt_with_their_end_token(opened):
    data = opened([{"messages": TALK}], length=128)
    (row,) = rows_of(data)
    assert learnt(data, row) == ["It is 5.<|im_end|>", "A caf\u00e9 \U0001f600 is open.<|im_end|>"]
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)
    ids, _ = data.tokenizer.encode_marked([text])[0]
    used = len(ids) - 1
    np.testing.assert_array_equal(row["tokens"][:used], ids[:-1])
    places = row["labels"][:used] != -100
    np.testing.assert_array_equal(row["labels"][:used][places], ids[1:][places])
    assert (row["segment_ids"][:used] == 1).all() and (row["segment_ids"][used:] == 2).all()
    np.testing.assert_array_equal(row["positions"][:used], np.arange(used))


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma", MARKED, TOOLS, FORGETS], ids=lambda t: t[:12])
@pytest.mark.parametrize("prompt", [False, True])
def test_texts_and_ids_are_those_of_transformers(template, prompt, folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    if "{" in template:
        (tmp_path / "t.jinja").write_text(template)
    ours = choose_template(
        str(tmp_path / "t.jinja") if "{" in template else template,
        read_tokenizer_file(str(folder)).chat,
        datetime.date(2024, 7, 26),
    )
    talk = TALK[1:] if template == "gemma" else TALK
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": "<a & b>"}}}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ask = {"tools": tools, "add_generation_prompt": prompt, "chat_template": ours.source}
    text = ours.render(talk, tools, prompt=prompt)
    assert text == theirs.apply_chat_template(talk, tokenize=False, **ask)
    ids = theirs.apply_chat_template(talk, tokenize=True, return_dict=False, **ask)
    assert read_tokenizer_file(str(folder)).encode_marked([text])[0][0].tolist() == list(ids)


def test_marks_of_generation_say_what_is_learnt_as_in_transformers(opened, folder):
    data = opened([{"messages": TALK}], length=128, template="auto")
    (row,) = rows_of(data)
    transformers = pytest.importorskip("transformers")
    found = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TALK, return_dict=True, return_assistant_tokens_mask=True
    )
    mask = np.array(found["assistant_masks"][1:], bool)
    np.testing.assert_array_equal(row["labels"][: len(mask)] != -100, mask)


def test_a_template_that_rewrites_earlier_turns_is_refused_but_for_last_answers(opened, tmp_path):
    (tmp_path / "forgets.jinja").write_text(FORGETS)
    with pytest.raises(JaxstackError, match=r"chats.jsonl, line 1: .*message 3, an answer, .*answers=last"):
        opened([{"messages": TALK}], template=str(tmp_path / "forgets.jinja"))
    data = opened([{"messages": TALK}], length=128, template=str(tmp_path / "forgets.jinja"), answers="last")
    assert learnt(data, rows_of(data)[0]) == ["A caf\u00e9 \U0001f600 is open.<|im_end|>"]


WITHOUT_END = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
THINKING = UNMARKED.removesuffix("{% endif %}") + "<think>{% endif %}"


def test_an_answer_is_learnt_with_its_end_token_where_the_marks_leave_it_out(opened, tmp_path):
    (tmp_path / "marks.jinja").write_text(WITHOUT_END)
    data = opened([{"messages": TALK}], length=128, template=str(tmp_path / "marks.jinja"))
    assert learnt(data, rows_of(data)[0]) == ["It is 5.<|im_end|>", "A caf\u00e9 \U0001f600 is open.<|im_end|>"]


@pytest.mark.parametrize("template", ["chatml", MARKED, WITHOUT_END, THINKING])
def test_the_end_of_an_answer_is_a_token_whatever_the_template_marks(template, folder, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(template)
    chosen = choose_template(template if template == "chatml" else str(path), None, datetime.date(2026, 1, 1))
    assert chosen.find_answer_end(read_tokenizer_file(str(folder)).special_tokens) == "<|im_end|>"


@pytest.mark.parametrize("answers", ["all", "last"])
def test_answers_that_do_not_begin_as_the_template_asks_for_them_are_refused_with_a_way_out(opened, tmp_path, answers):
    (tmp_path / "thinks.jinja").write_text(THINKING)
    with pytest.raises(ConfigError, match=r"message 3, an answer, with '<think>'|message 5, an answer") as caught:
        opened([{"messages": TALK}], template=str(tmp_path / "thinks.jinja"), answers=answers)
    assert "answers=last" not in str(caught.value) and "data.chat.template" in str(caught.value)


def test_a_chat_with_tools_is_written_by_the_template_for_tools(folder, tmp_path, cache):
    place = tmp_path / "tokenizer"
    place.mkdir()
    (place / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    named = [
        {"name": "default", "template": MARKED},
        {"name": "tool_use", "template": "TOOLS {{ tools[0].name }} " + MARKED},
    ]
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": TALK, **more}) + "\n" for more in ({}, {"tools": [{"name": "clock"}]}))
    )
    source = SourceConfig(path=str(path), format="chat")
    tokenizer = TokenizerConfig(name="file", path=str(place))
    config = DataConfig(
        sources=(source,), tokenizer=tokenizer, held_out_fraction=0.0, cache_dir=str(cache), packing=False
    )
    data = open_data(config, sequence_length=128, seed=0)
    model = Tokenizer.from_file(str(place / "tokenizer.json"))
    texts = sorted(model.decode(row["tokens"].tolist(), skip_special_tokens=False)[:11] for row in rows_of(data))
    assert texts == ["<|im_start|", "TOOLS clock"]
    data.tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").chat.named == {"tool_use": named[1]["template"]}


def test_special_tokens_in_tools_are_refused_as_in_messages(opened):
    with pytest.raises(ConfigError, match=r"line 1: its text contains '<\|im_end\|>'"):
        opened([{"messages": TALK, "tools": [{"name": "<|im_end|>"}]}])


def test_prompts_with_completions_are_chats_or_as_they_are(opened):
    pair = {"prompt": "2 + 3 =", "completion": " 5"}
    data = opened([pair])
    assert learnt(data, rows_of(data)[0]) == [" 5<|im_end|>"]
    data = opened([pair], template="none")
    assert learnt(data, rows_of(data)[0]) == [" 5<|endoftext|>"]
    assert rows_of(data)[0]["tokens"][0] == data.tokenizer.document_start
    with pytest.raises(
        ConfigError, match=r"line 1: the token ' is' spans the border between the answer and the text before"
    ):
        opened([{"prompt": "2 ", "completion": "is even"}], template="none")


def test_every_example_stands_in_one_row_once(opened):
    random = np.random.default_rng(0)
    records = [{"prompt": f"{i}", "completion": "x " * int(random.integers(1, 40))} for i in range(60)]
    data = opened(records, length=128)
    lengths = []
    for row in rows_of(data):
        ids = row["segment_ids"]
        assert (np.diff(ids) >= 0).all()
        for segment in range(1, ids.max() + 1):
            part = ids == segment
            np.testing.assert_array_equal(row["positions"][part], np.arange(part.sum()))
            if (row["labels"][part] != -100).any():
                lengths.append(part.sum())
    assert len(lengths) == 60 and data._rows[0].used == sum(lengths) / (128 * data._rows[0].count) > 0.9
    apart = opened(records, length=128, packing=False)
    assert apart._rows[0].count == 60 and all(row["segment_ids"].max() <= 2 for row in rows_of(apart))


def test_packing_is_best_fit_decreasing():
    assert pack(np.array([3, 5, 2, 6, 4]), 8) == [[3, 2], [1, 0], [4]]
    random = np.random.default_rng(1).integers(1, 65, 1000)
    rows = pack(random, 64)
    assert sorted(i for row in rows for i in row) == list(range(1000))
    assert max(random[row].sum() for row in rows) <= 64 and len(rows) <= 1.02 * np.ceil(random.sum() / 64)


def test_long_chats_are_cut_or_left_out_or_refused_and_the_user_is_told(opened):
    records = [{"prompt": "p", "completion": "a " * 100}, {"prompt": "q " * 100, "completion": "a"}, {"messages": TALK}]
    data = opened(records, length=64)
    assert data._rows[0].fitted.total - data._rows[0].fitted.left_out == 2
    assert "3 chats are too long" in opened.said[-1] and "1 are left out" in opened.said[-1]
    data = opened([*records, {"prompt": "p", "completion": "b"}], too_long="drop")
    assert sum((row["labels"] != -100).sum() for row in rows_of(data)) == data._rows[0].labels == 2
    with pytest.raises(ConfigError, match=r"3 of 3 chats .* more than sequence_length \(64\) tokens, the longest"):
        opened(records, too_long="refuse")


def test_held_out_chats_are_evaluated_label_by_label(opened):
    records = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(80)]
    data = opened(records, held_out=0.4)
    assert 0 < data.held_out_tokens < sum(data._rows[i].labels for i in range(1))
    for limit in (None, 5, data.held_out_tokens):
        batches = list(data.held_out_batches(batch_size=4, rows=range(4), max_tokens=limit))
        labels = np.concatenate([batch["labels"].ravel() for batch in batches])
        assert (labels != -100).sum() == (limit or data.held_out_tokens)
        assert data.held_out_bytes(limit) == data.tokenizer.decode_bytes(labels[labels != -100])
    whole = data.held_out_bytes().decode()
    assert "answer" in whole and "question" not in whole


def test_chats_and_texts_mix(opened, corpus, cache, folder, tmp_path):
    opened([{"messages": TALK}])
    chats = SourceConfig(path=str(tmp_path / "chats.jsonl"), format="chat")
    sources = (chats, SourceConfig(path=str(corpus), weight=3))
    config = DataConfig(
        sources=sources, tokenizer=TokenizerConfig(name="file", path=str(folder)), cache_dir=str(cache),
        chat=ChatConfig(template="chatml"), held_out=(SourceConfig(path=str(corpus)),),
    )  # fmt: skip
    data = open_data(config, sequence_length=64, seed=0)
    batch = next(data.batches(global_batch_size=8, rows=range(8), start=0))
    assert batch["tokens"].shape == (8, 64) and ((batch["labels"] == -100).any(1)).sum() == 2
    again = open_data(config, sequence_length=64, seed=0)
    assert again.fingerprint == data.fingerprint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"text": "a"}', "line 2 has neither messages nor a prompt and a completion; its keys: 'text'"),
        ('{"messages": []}', "line 2: messages must be a list of messages"),
        (
            '{"messages": [{"role": "user", "contnt": "a"}]}',
            "line 2: the content of message 1 must be a text; found no content; its keys: 'role', 'contnt'",
        ),
        ('{"messages": [{"content": "a"}]}', "line 2: message 1 must have a role"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 2 has no message of the role assistant"),
        ('{"prompt": "a<|im_end|>", "completion": "b"}', "line 2: its text contains '<|im_end|>', a special token"),
        ('{"prompt": 3, "completion": "b"}', "line 2: the content of message 1 must be a text; found 3"),
    ],
)
def test_a_line_that_is_no_chat_is_named(line, message, opened):
    with pytest.raises(JaxstackError, match=f"chats.jsonl, {message.replace('|', '[|]')}"):
        opened([], lines=[json.dumps({"messages": TALK}), line])


def test_templates_are_refused_with_their_reason(opened, tmp_path, folder):
    for name, text, reason in (
        ("broken", "{% for %}", "the chat template is not valid Jinja"),
        ("strict", "{{ raise_exception('no system role') }}", "line 1: .*cannot write this chat: no system role"),
        ("unsafe", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot write this chat: .*unsafe"),
        ("file", "{% include '/etc/hostname' %}", "cannot write this chat"),
    ):
        (tmp_path / f"{name}.jinja").write_text(text)
        with pytest.raises(JaxstackError, match=reason):
            opened([{"messages": TALK}], template=str(tmp_path / f"{name}.jinja"))
    with pytest.raises(ConfigError, match="'chatlm' is not a file, nor one of auto, none, chatml, gemma, llama3"):
        opened([{"messages": TALK}], template="chatlm")
    assert issubclass(ChatError, JaxstackError)


def test_chats_need_a_tokenizer_of_their_model(tmp_path, cache):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    source = SourceConfig(path=str(tmp_path / "a.jsonl"), format="chat")
    with pytest.raises(ConfigError, match="set run.init_from to a model that has one"):
        open_data(DataConfig(sources=(source,), cache_dir=str(cache)), sequence_length=8, seed=0)
    config = DataConfig(sources=(source,), cache_dir=str(cache), tokenizer=TokenizerConfig(name="byte"))
    with pytest.raises(ConfigError, match="the tokenizer has no chat template; set data.chat.template"):
        open_data(config, sequence_length=8, seed=0)


def test_the_template_goes_with_the_tokenizer(opened, tmp_path):
    data = opened([{"messages": TALK}], template="llama3", length=128)
    data.tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.chat == data.tokenizer.chat and "<|eot_id|>" in again.chat.template
    assert again.chat.tokens["eos_token"] == "<|im_end|>"


def test_tokens_of_a_template_that_the_tokenizer_lacks_are_said(opened):
    opened([{"messages": TALK}], template="chatml")
    assert not any("no special tokens" in line for line in opened.said)
    opened([{"messages": TALK[1:]}], template="gemma")
    (line,) = (line for line in opened.said if "no special tokens" in line)
    assert line.startswith("the chat template writes <end_of_turn>, <start_of_turn>, no special tokens")


PREFERENCE = {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 6 is open", "margin": 0.5}


def test_a_preference_is_a_pair_of_rows_of_which_the_answers_are_compared(opened):
    turns = [{"role": role, "content": text} for role, text in (("user", "a?"), ("assistant", "b"), ("user", "c?"))]
    answer = [{"role": "assistant", "content": " 5"}]
    records = [PREFERENCE, {"messages": turns, "chosen": answer, "rejected": "no"}]
    data = opened(records, format="preference")
    row, talk = sorted(rows_of(data), key=lambda row: -float(row["margin"]))
    assert [learnt(data, {"labels": x}) for x in row["labels"]] == [[" 5<|im_end|>"], [" 6 is open<|im_end|>"]]
    assert [learnt(data, {"labels": x}) for x in talk["labels"]] == [[" 5<|im_end|>"], ["no<|im_end|>"]]
    assert (row["margin"], talk["margin"]) == (0.5, 0)
    asked = data.tokenizer.encode_marked(["<|im_start|>user\n2 + 3 =<|im_end|>\n<|im_start|>assistant\n"])[0][0]
    for tokens, labels in zip(row["tokens"], row["labels"], strict=True):
        np.testing.assert_array_equal(tokens[: len(asked)], asked)
        assert (labels[: len(asked) - 1] == -100).all() and labels[len(asked) - 1] == tokens[len(asked)]
    plain = opened([PREFERENCE], format="preference", template="none")
    assert [learnt(plain, {"labels": x})[0][:2] for x in rows_of(plain)[0]["labels"]] == [" 5", " 6"]
    assert rows_of(plain)[0]["tokens"][0, 0] == data.tokenizer.document_start
    assert "1 pairs of answers in rows of 64" in opened.said[-1]


def test_pairs_stay_whole_in_batches_and_on_one_side_of_the_split(opened):
    records = [{"prompt": f"{i}", "chosen": f" {i} yes", "rejected": f" {i} no"} for i in range(60)]
    data = opened(records, format="preference", held_out=0.3)
    batch = next(data.batches(global_batch_size=4, rows=[1, 3], start=0))
    assert {name: x.shape for name, x in batch.items()} == {"tokens": (2, 2, 64), "labels": (2, 2, 64), "margin": (2,)}
    rows = [*data._rows, *data._held_out_rows]
    assert sum(r.count for r in rows) == 60 and data.held_out_tokens == rows[1].labels > 0
    for one in rows:
        for row in (one.read(i) for i in range(one.count)):
            yes, no = (learnt(data, {"labels": x})[0] for x in row["labels"])
            assert yes.split(" yes")[0] == no.split(" no")[0] and yes.startswith(" ")
    limit = rows[1].read(0)["labels"]
    limit = int((limit != -100).sum()) + 1
    found = list(data.held_out_batches(batch_size=4, rows=range(4), max_tokens=limit))
    assert len(found) == 1 and [(x != -100).any() for x in found[0]["labels"]] == [True, True, False, False]


def test_mismatched_rows_have_the_prompt_with_the_answer_of_the_next_pair(opened):
    records = [{"prompt": f"{i}", "chosen": f" {i} yes", "rejected": " no"} for i in range(3)]
    data = opened(records, format="preference", more={"mismatched": True})
    rows = rows_of(data)
    answers = [[learnt(data, {"labels": x})[0] for x in row["labels"]] for row in rows]
    for own, following in zip(answers, [*answers[1:], answers[0]], strict=True):
        assert own[1] == " no<|im_end|>" and own[2] == following[0] != own[0]
    first = rows[0]
    asked = int(np.flatnonzero(first["labels"][0] != -100)[0]) + 1
    np.testing.assert_array_equal(first["tokens"][2, :asked], first["tokens"][0, :asked])
    np.testing.assert_array_equal(first["labels"][2][: asked - 1], -100)
    short = opened(records, length=16, format="preference", more={"mismatched": True}, template="none")
    assert all(row["tokens"].shape == (3, 16) for row in rows_of(short))


def test_answers_without_a_partner_have_a_label(opened):
    """As TRL's unpaired preferences: the row of the other answer is empty, and kto alone takes them."""
    records = [{"prompt": f"{i}", "completion": f" {i} yes", "label": i % 2 == 0} for i in range(4)]
    data = opened(records, format="preference", more={"mismatched": True})
    rows = rows_of(data)
    for number, row in enumerate(rows):
        answers = [learnt(data, {"labels": x}) for x in row["labels"]]
        own = [f" {number} yes<|im_end|>"]
        assert answers[:2] == ([own, []] if number % 2 == 0 else [[], own])
        assert answers[2] == [f" {(number + 1) % 4} yes<|im_end|>"]
    plain = opened(records, format="preference", more={"mismatched": True}, template="none")
    assert (rows_of(plain)[0]["tokens"][1] == 0).all() and (rows_of(plain)[1]["labels"][0] == -100).all()
    with pytest.raises(ConfigError, match="4 of 4 preferences have one answer only, which is for preference.loss=kto"):
        opened(records, format="preference")
    with pytest.raises(ConfigError, match="a label, true if it is good; found label 1"):
        opened([{**records[0], "label": 1}], format="preference", more={"mismatched": True})


def test_pairs_that_are_too_long_are_refused_or_left_out_but_never_cut(opened):
    records = [PREFERENCE, {"prompt": "p", "chosen": "a", "rejected": "b " * 100}]
    with pytest.raises(ConfigError, match=r"1 of 2 pairs .* set data.chat.too_long to drop, as answers are not cut"):
        opened(records, format="preference")
    assert opened(records, format="preference", too_long="drop")._rows[0].count == 1
    assert "1 are left out as too long" in opened.said[-1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "has a prompt or messages, a chosen and a rejected answer; its keys: 'prompt',",
        ),
        ({"chosen": "a", "rejected": "b"}, "a preference has a prompt or messages"),
        ({**PREFERENCE, "rejected": ""}, "the rejected answer is empty"),
        ({**PREFERENCE, "chosen": []}, "the chosen answer is empty"),
        ({**PREFERENCE, "margin": "large"}, 'margin is a number; found "large"'),
        ({**PREFERENCE, "chosen": TALK[1:3]}, "messages that begin with the role assistant; found .*role.*user"),
        ({**PREFERENCE, "chosen": "a<|im_end|>"}, "chosen: its text contains '<|im_end|>'"),
        ({**PREFERENCE, "prompt": 3}, "chosen: the content of message 1 must be a text; found 3"),
    ],
)
def test_a_line_that_is_no_preference_is_named(record, message, opened):
    with pytest.raises(ConfigError, match=f"line 1.*{message.replace('|', '[|]')}"):
        opened([record], format="preference")


def test_preferences_are_not_mixed_with_texts(opened):
    with pytest.raises(ConfigError, match="format preference are not mixed with others; found also auto"):
        DataConfig(sources=(SourceConfig(path="a", format="preference"), SourceConfig()))
    with pytest.raises(ConfigError, match="without a chat template prompt, chosen and rejected are texts"):
        opened([{**PREFERENCE, "prompt": TALK}], format="preference", template="none")
