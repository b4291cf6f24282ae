"""The user's private cache of tokens and tokenizers made from raw text, keyed by a hash of their input."""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers as tokenizers_library

from jaxstack.data.build_shards import TOKENIZER, BuildOptions, build, build_key
from jaxstack.data.config import SourceConfig, TokenizerConfig
from jaxstack.data.load_tokenizer import load_tokenizer, read_tokenizer_file
from jaxstack.data.shards import INDEX, read_index
from jaxstack.data.subword import train_bpe
from jaxstack.data.tokenization_plan import TokenizationPlan, make_plan
from jaxstack.data.tokenize_documents import sample_texts
from jaxstack.data.tokenizer import CONFIG_FILE, ByteTokenizer, Tokenizer
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.files import exclusive, writing_to
from jaxstack.observe.number_format import byte_size

TRAINING_SAMPLE_BYTES = 16 * 2**20
Report = Callable[[str], None]


def cache_folder(configured: str | None) -> Path:
    """Return the data cache directory, created private to the user (mode 0700), as its content is trusted later.

    Raises:
      ConfigError: it cannot be created or written, or belongs to another user.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxstack" / "data"
    folder = Path(configured) if configured else default
    try:
        folder = folder.expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = folder.stat().st_uid
    except (OSError, RuntimeError) as e:
        raise ConfigError(f"cannot make the data cache {folder}: {e}; set data.cache_dir to another place") from None
    if owner not in (os.getuid(), 0):
        raise ConfigError(f"the data cache {folder} belongs to user id {owner}: set data.cache_dir to a private place")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the data cache {folder} cannot be written: set data.cache_dir to another place")
    return folder


def ensure_tokenizer(
    config: TokenizerConfig, plans: Sequence[TokenizationPlan], folder: Path, report: Report
) -> Tokenizer:
    """Return the configured tokenizer; a BPE is trained once on the training documents of `plans` and cached.

    Args:
      config: the choice of tokenizer.
      plans: the sources for training a BPE.
      folder: the cache directory.
      report: called with a line of text when something takes time.
    """
    if config.name == "byte":
        return ByteTokenizer()
    if config.path:
        return read_tokenizer_file(config.path, config.document_start)
    recipe = [
        config.vocab_size,
        TRAINING_SAMPLE_BYTES,
        tokenizers_library.__version__,
        *(p.identity for p in plans),
    ]
    place = folder / "tokenizers" / hashlib.sha256(repr(recipe).encode()).hexdigest()[:24]
    if (place / CONFIG_FILE).is_file():
        return _load_or_drop(place, report) or ensure_tokenizer(config, plans, folder, report)
    waiting = "waiting for another process that trains the tokenizer"
    with writing_to(place.parent), exclusive(place.with_suffix(".lock"), lambda: report(waiting)):
        if not (place / CONFIG_FILE).is_file():
            report(f"training a BPE tokenizer of {config.vocab_size} ids")
            train_tokenizer(plans, config.vocab_size).save(place)
    return load_tokenizer(place)


def _load_or_drop(place: Path, report: Report) -> Tokenizer | None:
    try:
        return load_tokenizer(place)
    except JaxstackError as e:
        report(f"the cached tokenizer is made again: {e}")
        shutil.rmtree(place)
        return None


def train_tokenizer(plans: Sequence[TokenizationPlan], vocab_size: int) -> Tokenizer:
    """Train a BPE tokenizer on a bounded sample of the training documents; the same files give the same sample."""
    budget = TRAINING_SAMPLE_BYTES // max(len(plans), 1)
    texts = (text for plan in plans for text in sample_texts(plan.units, budget))
    return train_bpe(texts, vocab_size)


def ensure_tokens(plan: TokenizationPlan, tokenizer: Tokenizer, folder: Path, options: BuildOptions) -> Path:
    """Return the cache directory with the token shards of some raw text, tokenizing it now if it is not cached yet.

    One process writes; others wait for it.
    """
    place = folder / "tokens" / build_key(plan, tokenizer, options.shard_tokens)[:24]
    if not (place / INDEX).is_file():
        waiting = "waiting for another process that prepares the data"
        with writing_to(place.parent), exclusive(place.with_suffix(".lock"), lambda: options.report(waiting)):
            if not (place / INDEX).is_file():
                options.report(f"tokenizing {byte_size(plan.size)} of text into {place}")
                build(plan, place, tokenizer, options)
    return place


def plan_source(source: SourceConfig, held_out_fraction: float) -> TokenizationPlan:
    """Return the plan for tokenizing one source of raw text: its files, cut or grouped into units of work."""
    return make_plan([source], held_out_fraction)


def load_prepared_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer stored with token shards, and check that it is the one that made them.

    Raises:
      JaxstackError: it is another tokenizer than the one that made the shards.
    """
    tokenizer = load_tokenizer(folder / TOKENIZER)
    expected = read_index(folder)["tokenizer"]["hash"]
    if tokenizer.hash != expected:
        raise JaxstackError(f"{folder}/{TOKENIZER} is not the tokenizer that its shards were made with: restore it")
    return tokenizer
