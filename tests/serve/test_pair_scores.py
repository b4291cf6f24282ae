"""Scores of pairs of texts and ranked documents: cosines of embeddings, or scores of a sequence classifier's head."""

import base64

import numpy as np
import pytest

from jaxstack.serve.pair_scores import Classifier
from tests.serve.test_http import LIMITS, ask, client, engine, idle, listen, port  # noqa: F401 fixtures

QUERY = "a city"
DOCUMENTS = ["Oslo", "a city in Norway", "x" * 90]


def test_scores_are_cosines_of_embeddings(client, engine, port):  # noqa: F811
    """Of one text with each of several, or of pairs, under each name of the route and of the fields."""
    texts = [QUERY, *DOCUMENTS]
    found = client.embeddings.create(model="tiny", input=texts)
    query, *documents = (np.array(entry.embedding) for entry in found.data)
    wanted = [float(query @ document) for document in documents]
    for path, body in (
        ("/v1/score", {"model": "tiny", "text_1": QUERY, "text_2": DOCUMENTS}),
        ("/score", {"queries": [QUERY], "documents": DOCUMENTS, "encoding_format": "float"}),
        ("/score", {"data_1": [QUERY] * 3, "data_2": DOCUMENTS, "priority": 1}),
    ):
        status, answer, _ = ask(port, path, body)
        assert status == 200 and answer["object"] == "list" and answer["model"] == "tiny"
        assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(i, "score") for i in range(3)]
        np.testing.assert_allclose([entry["score"] for entry in answer["data"]], wanted, atol=1e-5)
        assert answer["usage"]["prompt_tokens"] >= found.usage.prompt_tokens
    for path, more in (("/v1/rerank", {"top_n": 2}), ("/v2/rerank", {"top_n": 0}), ("/rerank", {})):
        documents = [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}]
        status, ranked, _ = ask(port, path, {"query": QUERY, "documents": documents, **more})
        order = sorted(range(3), key=lambda number: -wanted[number])[: more.get("top_n") or None]
        assert status == 200 and [entry["index"] for entry in ranked["results"]] == order
        assert ranked["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
        assert ranked["results"][0]["relevance_score"] == pytest.approx(max(wanted), abs=1e-5)
        assert ranked["usage"]["total_tokens"] == found.usage.prompt_tokens
    _, bare, _ = ask(port, "/rerank", {"query": QUERY, "documents": DOCUMENTS, "return_documents": False})
    assert [*bare["results"][0]] == ["index", "relevance_score"] and idle(engine)


def test_a_sequence_classifier_scores_its_own_form_of_a_pair(client, engine, port):  # noqa: F811
    """By its head and the last hidden state; mapped by the logistic function unless the request says no."""
    weights = np.random.default_rng(0).normal(size=32).astype(np.float32)
    encoded = list[tuple[str, str]]()

    def encode(first: str, second: str) -> list[int]:
        encoded.append((first, second))
        return [256, *f"{first}\n{second}".encode()]

    server, place = listen(engine, LIMITS, classifier=Classifier(weights, encode))
    _, answer, _ = ask(place, "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False})
    scores = np.array([entry["score"] for entry in answer["data"]])
    wanted = [engine.embed([256, *f"{QUERY}\n{text}".encode()]) for text in DOCUMENTS]
    for request in wanted:
        request.result()
    np.testing.assert_allclose(scores, [request.pooled[1] @ weights for request in wanted], rtol=1e-4)
    assert encoded == [(QUERY, document) for document in DOCUMENTS]
    _, answer, _ = ask(place, "/rerank", {"query": QUERY, "documents": DOCUMENTS})
    ranked = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    fields = {"text_1": "a", "text_2": "b" * 300, "truncate_prompt_tokens": 9}
    for listening in (port, place):
        status, answer, _ = ask(listening, "/score", fields)
        assert status == 200 and answer["usage"]["prompt_tokens"] == (9 if listening == place else 2 + 9)
    np.testing.assert_allclose([ranked[number] for number in range(3)], 1 / (1 + np.exp(-scores)), rtol=1e-4)
    server.should_exit = True


def test_pooling_returns_embeddings_and_scores_of_texts(client, engine, port):  # noqa: F811
    """Embeddings of a model without a head; with one, a score for each text, also as the label of /classify."""
    found = client.embeddings.create(model="tiny", input=DOCUMENTS)
    for more in ({}, {"task": "embed", "dimensions": 32, "truncate_prompt_tokens": None}):
        status, answer, _ = ask(port, "/pooling", {"model": "tiny", "input": DOCUMENTS, **more})
        assert status == 200 and [(entry["index"], entry["object"]) for entry in answer["data"]] == [
            (i, "pooling") for i in range(3)
        ]
        for entry, wanted in zip(answer["data"], found.data, strict=True):
            np.testing.assert_allclose(entry["data"], wanted.embedding, atol=1e-5)
        assert answer["usage"]["total_tokens"] == found.usage.total_tokens
    whole = engine.embed([256, *DOCUMENTS[0].encode()])
    whole.result()
    body = {"input": DOCUMENTS[0], "use_activation": False, "encoding_format": "base64"}
    _, answer, _ = ask(port, "/pooling", body)
    bare = np.frombuffer(base64.b64decode(answer["data"][0]["data"]), "<f4")
    np.testing.assert_allclose(bare, whole.pooled[1], rtol=1e-4)
    weights = np.random.default_rng(0).normal(size=32).astype(np.float32)
    server, place = listen(engine, LIMITS, classifier=Classifier(weights, lambda first, second: []))
    score = float(whole.pooled[1] @ weights)
    ids = [256, *DOCUMENTS[0].encode()]
    for given in (DOCUMENTS[0], [ids]):
        _, answer, _ = ask(place, "/classify", {"input": given})
        (entry,) = answer["data"]
        assert entry["probs"] == [pytest.approx(1 / (1 + np.exp(-score)), rel=1e-4)]
        assert (entry["label"], entry["num_classes"], answer["usage"]["prompt_tokens"]) == ("LABEL_0", 1, len(ids))
    _, answer, _ = ask(place, "/pooling", {"input": DOCUMENTS[0], "use_activation": False})
    assert answer["data"][0]["data"] == [pytest.approx(score, rel=1e-4)]
    _, answer, _ = ask(place, "/pooling", {"input": DOCUMENTS[0], "task": "embed"})
    assert len(answer["data"][0]["data"]) == 32
    server.should_exit = True


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/classify", {"input": "a"}, "has no head that classifies texts"),
        ("/pooling", {"input": "a", "task": "classify"}, "has no head that classifies texts"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "token_embed asks for values of each token"),
        ("/pooling", {"input": "a", "dimensions": 5}, "dimensions must be 32"),
        ("/pooling", {"input": []}, "input"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "as many as text_2; found 2 and 3"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "text_2": []}, "at least one text"),
        ("/score", {"text_1": "a", "text_2": ["b", 5]}, "item 1 is no text"),
        ("/score", {"text_1": "a", "text_2": "b" * 300}, "exceeds the context of 256"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 70}, "1 to 64 "),
        ("/rerank", {"query": "a", "documents": "b"}, "it must be a list of texts; found a value of type str"),
        ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "item 0 is no text"),
    ],
)
def test_wrong_requests_are_told_why(port, path, body, message):  # noqa: F811
    status, answer, _ = ask(port, path, body)
    assert status == 400 and message in answer["error"]["message"]
