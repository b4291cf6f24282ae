"""Configuration of rollouts: how many prompts are answered, and how the engine samples the answers."""

from pydantic import Field, field_validator

from jaxstack.config.base import Component
from jaxstack.reinforce.scorers import check_path


class SamplerConfig(Component):
    """Configuration of the engine that samples answers between the train steps."""

    slots: int | None = Field(default=None, ge=1)
    """Largest number of answers that are sampled at a time; null: all of a rollout, at most 256 on each device. Each
    takes room for `train.sequence_length` tokens in the cache of keys and values, which is free while the model
    trains."""
    page_size: int = Field(default=16, ge=1)
    """Tokens per page of the cache."""
    decode_steps: int = Field(default=8, ge=1, le=64)
    """Number of tokens of each answer that one program samples, before the host looks which answers have ended."""
    exact: bool = False
    """Compute the log-probabilities of sampled tokens with the same bits in the sampler and in training, by kernels
    whose order of sums does not depend on the batch. Slower; not for every model and layout."""


class EnvironmentConfig(Component):
    """Configuration of an environment: tools that answers may call, and what follows an answer."""

    path: tuple[str, ...] = ()
    """Functions, which are tools, and at most one class with `reset`, `step` and further tools, each as
    `module:name` or `file.py:name`; modules are also looked for in the working directory. []: a prompt has one
    answer."""
    turns: int = Field(default=8, ge=1)
    """Largest number of answers of a sample."""
    time_limit: float = Field(default=10.0, gt=0, le=3600)
    """Seconds for each call."""
    workers: int | None = Field(default=None, ge=1)
    """Samples whose calls run at a time; null: the number of processors."""

    @field_validator("path")
    @classmethod
    def _names_code(cls, path: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_path, path))


class RolloutConfig(Component):
    """Configuration of a rollout: prompts, length and temperature of their answers."""

    prompts: int = Field(default=16, ge=1)
    """Number of prompts of a rollout, each with `policy.samples` answers."""
    max_tokens: int = Field(default=256, ge=1)
    """Token limit of an answer, its stop token included; with an environment, of all that follows the prompt."""
    temperature: float = Field(default=1.0, gt=0, le=100)
    """Divisor of the logits, when answers are sampled and when they are trained on."""
    resample: int = Field(default=0, ge=0)
    """Largest number of further rollouts of a step, of other prompts, whose groups replace those with equal rewards
    (dynamic sampling of DAPO, arXiv:2503.14476)."""
    packing: bool = False
    """Train on several answers in a row, by best fit, and leave out the microbatches (`train.gradient_accumulation`)
    that are then empty."""
    stale_steps: int = Field(default=0, ge=0)
    """Number of train steps between the weights that sample answers and those that train on them. 0: answers are
    sampled with the newest weights, before each step; 1 or more: while steps run, with weights of so many before."""
    carried_prompts: int = Field(default=0, ge=0)
    """Number of further prompts that are answered at the same time. A rollout ends when all answers to `prompts` of
    them are complete; the others go on in the next rollout, after the tokens that they have (partial rollouts)."""
    eval_prompts: int = Field(default=256, ge=1)
    """Largest number of held-out prompts that an evaluation answers, each once at the temperature and once greedily."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """Tools and turns."""
    engine: SamplerConfig = SamplerConfig()
    """The engine that samples."""
