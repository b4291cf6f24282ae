"""How closely our models compute what transformers computes from the same Hugging Face files, family by family.

    python benchmarks/models/families.py                 # every family
    python benchmarks/models/families.py gpt-oss olmo3   # some

The files are the small random models of tests/models/huggingface/, with the logits and greedy tokens that transformers
computed from them on a CPU in float32 (scripts/make_huggingface_fixtures.py). `logits_difference` is the largest
absolute difference, `largest_logit` the largest absolute value; `greedy_tokens` counts those of transformers' greedy
answer that decoding from our cache repeats, before the first other one. Rows are appended to
benchmarks/results/families.jsonl.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rows import append_rows, print_table, require_commit

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "models" / "huggingface"
FAMILIES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
PROMPT = 6
"""Tokens before transformers' greedy answer."""
COLUMNS = ("work", "largest_logit", "logits_difference", "greedy_tokens", "greedy_expected")


def measure(family: str) -> dict[str, Any]:
    """Return the row of a family."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from safetensors.numpy import load_file

    from jaxstack.decoding.decoder import Decoder
    from jaxstack.decoding.sampling import Sampling
    from jaxstack.models import Transformer, from_huggingface
    from jaxstack.module_arrays.module import ModuleArrays
    from jaxstack.parallel import ParallelConfig, make_mesh, make_rules

    expected = load_file(FIXTURES / family / "expected.safetensors")
    model = from_huggingface(FIXTURES / family)
    found = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(expected["tokens"])))
    module = ModuleArrays(lambda rngs: Transformer(model.config, rngs))
    decoder = Decoder(module, *module.split(model), make_rules(make_mesh(ParallelConfig(), jax.devices()[:1])))
    answer = expected["greedy"].tolist()
    prompt = expected["tokens"][0, :PROMPT].tolist()
    ours = [int(ids[0]) for ids in decoder.generate([prompt], len(answer), Sampling(temperature=0.0))]
    same = next((n for n, pair in enumerate(zip(ours, answer, strict=True)) if pair[0] != pair[1]), len(answer))
    return {
        "work": family, "implementation": "jaxstack", "device": jax.devices()[0].device_kind,
        "largest_logit": float(np.abs(expected["logits"]).max()),
        "logits_difference": float(np.abs(found - expected["logits"]).max()),
        "greedy_tokens": same, "greedy_expected": len(answer),
    }  # fmt: skip


def main() -> None:
    """Measure the families one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"to measure (default: all): {', '.join(FAMILIES)}")
    args = parser.parse_args()
    if unknown := sorted(set(args.families) - set(FAMILIES)):
        parser.error(f"unknown families: {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
    require_commit("families")
    rows = []
    for family in args.families or FAMILIES:
        rows.append(measure(family))
        print(f"{family}: logits to {rows[-1]['logits_difference']:.1e}", flush=True)
    append_rows("families", rows)
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
