"""The benchmark of decoding measures steps from a cache of random contents without computing the prompts."""

import jax
import numpy as np
import pytest

from benchmarks.serving.generate import MODELS, FilledDecoder, make_decoder
from jaxstack.decoding.sampling import Sampling
from jaxstack.run_config import load_config


@pytest.mark.longer
def test_a_filled_cache_stands_for_prompts_that_are_not_computed():
    decoder = make_decoder(load_config(None, MODELS["tiny-hybrid"]), False, FilledDecoder)
    tokens = np.array(list(decoder.generate([[1, 2, 3], [1, 2, 3]], 4, Sampling(temperature=0.0))))
    assert tokens.shape == (4, 2) and (tokens[:, 0] != tokens[:, 1]).any()
    engine = decoder._engines[0]
    assert engine is not None
    leaves = [np.asarray(x, np.float32) for x in jax.tree.leaves(engine.programs._pages)]
    assert len(leaves) >= 4 and min(np.std(x) for x in leaves) > 0.5
