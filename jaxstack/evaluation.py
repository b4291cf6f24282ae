"""What an evaluation says beside its loss."""

import math
from collections.abc import Mapping


def bits_per_byte(values: Mapping[str, float], num_bytes: int) -> dict[str, float]:
    """`eval_perplexity`, and `eval_bits_per_byte` = loss x tokens / ln 2 / bytes of the text that the tokens encode.

    Unlike a loss a token, bits per byte do not depend on the tokenizer.
    """
    loss = values["eval_loss"]
    found = {"eval_perplexity": math.exp(loss) if loss < 700 else math.inf}
    if num_bytes:
        found["eval_bits_per_byte"] = loss * values["eval_items"] / math.log(2) / num_bytes
    return found
