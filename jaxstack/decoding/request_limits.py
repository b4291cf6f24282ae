"""Checks of the requests to an engine: prompts must fit its context, and its programs must support the settings."""

import dataclasses
from collections.abc import Sequence

from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.scores import MOST_LIKELIEST
from jaxstack.decoding.step import Programs
from jaxstack.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Limits of the requests to an engine.

    Attributes:
      model: its model.
      programs: its programs.
      context: largest number of tokens of a prompt and its answer together.
      vocab_size: number of ids that may be generated.
    """

    model: ModelOnMesh
    programs: Programs
    context: int
    vocab_size: int

    def check_prompt(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Check that the engine's limits allow a prompt and `max_tokens` generated tokens.

        Raises:
          ConfigError: they do not, or the prompt has unknown ids.
        """
        if isinstance(prompt, str | bytes):
            raise ConfigError("a prompt is a sequence of token ids; encode a text by the model's tokenizer first.")
        if len(prompt) + max_tokens > self.context:  # first, as the other checks look at every token
            fit = self.context - len(prompt)
            advice = f"at most {fit} new tokens fit" if fit > 0 else "shorten the prompt"
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens, which with {max_tokens} new tokens exceeds the context of "
                f"{self.context} tokens; {advice}."
            )
        wrong = next((token for token in prompt if not hasattr(token, "__index__")), None)
        if wrong is not None:
            raise ConfigError(f"token ids must be whole numbers; found {wrong!r}.")
        if not len(prompt):
            raise ConfigError("a prompt must have at least one token.")
        if min(prompt) < 0:
            raise ConfigError(f"token ids must be at least 0; found {min(prompt)}.")
        if max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1; found {max_tokens}.")
        self.model.check_ids([prompt])

    def check_sampling(self, sampling: Sampling | None, max_tokens: int) -> None:
        """Check that the engine's programs can compute what the settings of a request ask for.

        Raises:
          ConfigError: they cannot.
        """
        if sampling is None:
            return
        _check_count(sampling.logprobs, "logprobs")
        _check_count(sampling.prompt_logprobs, "prompt_logprobs")
        if sampling.logprobs is not None and self.programs.scores:
            raise _chosen_otherwise("logprobs need")
        if sampling.prompt_logprobs is not None:
            self.check_states("prompt_logprobs need")
        if not sampling.changes_logits:
            return
        if self.programs.scores:
            raise ConfigError("penalties, logit_bias and min_tokens would change the log-probabilities of this engine.")
        unknown = next((token for token in sampling.logit_bias or () if token >= self.vocab_size), None)
        if unknown is not None:
            raise ConfigError(f"logit_bias must name ids below {self.vocab_size}, their number; found {unknown}.")
        if sampling.min_tokens > max_tokens:
            raise ConfigError(f"min_tokens must be at most max_tokens ({max_tokens}); found {sampling.min_tokens}.")

    def check_states(self, needed: str) -> None:
        """Check that the programs keep the hidden states of prompts.

        Args:
          needed: what needs them, such as "embeddings need".

        Raises:
          ConfigError: they do not.
        """
        if not self.programs.keeps_states:
            raise _chosen_otherwise(needed)


def _check_count(count: int | None, name: str) -> None:
    if count is not None and not 0 <= count <= MOST_LIKELIEST:
        raise ConfigError(f"{name} must be 0 to {MOST_LIKELIEST}; found {count}.")


def _chosen_otherwise(needed: str) -> ConfigError:
    return ConfigError(f"{needed} an engine whose programs and shapes are chosen by its configuration.")
