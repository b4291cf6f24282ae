"""The tables of docs/serving-speed.md are what their script makes from the stored rows."""

from scripts.pages.serving_speed import decoding


def test_decoding_is_compared_with_a_peer():
    table = decoding()
    assert "| compiled PyTorch |" in table and "llama3-1b, 1 x 512" in table
