"""Decoders of stored models, for tests that compare their parameters and logits."""

from jaxstack.decoding.decoder import Decoder
from jaxstack.run.load import load_decoder, run_config, sets_layout
from jaxstack.stored import StoredModel


def decoder_of(directory, overrides=(), **options) -> Decoder:
    stored = StoredModel.open(directory)
    return load_decoder(stored, run_config(stored, overrides), layout_chosen=sets_layout(overrides), **options)
