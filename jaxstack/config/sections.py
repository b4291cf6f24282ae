"""The configuration sections `run` and `train`, which concern the run as a whole."""

import itertools
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from jaxstack.config.base import Component
from jaxstack.config.features import Excludes, Feature


class RunSection(Component):
    """Name, directory, seed and starting point of a run."""

    name: str = "run"
    """Name of the run directory. Default for a run from a file: the file's name."""
    dir: str = "runs"
    """Parent directory; the run directory is dir/name."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights, the data order and dropout."""
    init_from: str | None = None
    """Run directory or Hugging Face checkpoint that gives a new run its parameters, model and tokenizer."""
    direct_storage: bool = False
    """Read the weights of a Hugging Face checkpoint straight into GPU memory, by GPUDirect Storage (kvikio); where the
    machine does not have it, one line says why and they are read the usual way."""
    branch_from: str | None = None
    """Run directory whose checkpoint a new run goes on from with everything: parameters, optimizer state, step and
    position in the data. Model and tokenizer are that run's."""
    branch_step: int | None = Field(default=None, ge=1)
    """Step of that checkpoint; left out: the newest one."""

    @model_validator(mode="after")
    def _check_start(self) -> "RunSection":
        if self.branch_from is not None and self.init_from is not None:
            raise ValueError("init_from and branch_from exclude each other: a run starts anew or goes on; remove one.")
        if self.branch_step is not None and self.branch_from is None:
            raise ValueError(f"branch_step ({self.branch_step}) needs branch_from, the run that has the checkpoint.")
        return self

    @field_validator("init_from", "branch_from")
    @classmethod
    def _expand_home(cls, directory: str | None) -> str | None:
        return None if directory is None else str(Path(directory).expanduser())

    @field_validator("name")
    @classmethod
    def _check_directory_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name):
            rule = "must be 1 to 200 letters, digits, '.', '_' and '-', first a letter or digit, as a directory's name"
            raise ValueError(f"{rule}; found {name!r}.")
        return name


class BatchRamp(Component):
    """Configuration of the batch-size ramp: when the batch size doubles, and how the learning rate follows."""

    double_at_tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, max_length=20)
    """Numbers of tokens after which the batch doubles. The last doubling reaches train.global_batch_size, so k of them
    begin with global_batch_size / 2^k sequences."""
    learning_rate: Literal["sqrt", "linear", "constant"] = "sqrt"
    """Growth of the learning rate with the batch, up to optimizer.learning_rate: by its square root (for Adam), in
    proportion (for SGD), or none."""

    @property
    def learning_rate_exponent(self) -> float:
        """Exponent with which the learning rate grows with the batch size during the ramp: 0, 1/2 or 1."""
        return {"sqrt": 0.5, "linear": 1.0, "constant": 0.0}[self.learning_rate]

    @field_validator("double_at_tokens")
    @classmethod
    def _check_order(cls, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if any(later <= earlier for earlier, later in itertools.pairwise(tokens)):
            raise ValueError(f"must grow from entry to entry, such as [1000000, 3000000]; found {list(tokens)}.")
        return tokens


class TrainConfig(Component):
    """Number of steps, batch and sequence sizes, loss terms, and evaluation during training."""

    steps: int = Field(default=1000, ge=1, le=999_999_999)
    """Optimizer steps of the whole run."""
    global_batch_size: int = Field(default=8, ge=1)
    """Sequences per step, over all devices and microbatches."""
    sequence_length: int = Field(default=256, ge=1)
    """Tokens per sequence."""
    gradient_accumulation: int = Field(default=1, ge=1)
    """Microbatches per step. More of them use less memory and give the same result."""
    batch_ramp: BatchRamp | None = None
    """Begin with smaller batches, and double them at these numbers of tokens, `{double_at_tokens: [...]}`. The schedule
    then follows tokens: its steps have the run's mean batch size. Default: no ramp."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of log(Z)^2 in the loss."""
    mtp_loss_weight: float = Field(default=0.3, ge=0)
    """Weight of the mean loss of the model's `num_nextn_predict_layers` (DeepSeek-V3: 0.3, for the last third of the
    tokens 0.1); 0 freezes these layers."""
    eval_every_steps: int | None = Field(default=None, ge=1)
    """Steps between two evaluations on held-out data. Default: only one at the end."""
    eval_batch_size: int | None = Field(default=None, ge=1)
    """Sequences per evaluation batch. Default: global_batch_size / gradient_accumulation."""
    eval_tokens: int | None = Field(default=None, ge=1)
    """Token limit of each evaluation during training, which all predict the same tokens; after the last step a final
    evaluation takes all held-out tokens (`final_eval_loss`). Default: all of them, always."""
    eval_tasks: tuple[str, ...] = ()
    """Tasks of the lm-evaluation-harness, by name or file, that run with every evaluation."""
    eval_tasks_limit: int | None = Field(default=None, ge=1)
    """Maximum number of questions per task. Default: all."""
    xla_options: dict[str, bool | int | float | str] = {}
    """XLA options of the train step and of evaluation, `xla_gpu_...: value`, in addition to the built-in ones. Options
    that the installed jaxlib knows under another name are translated, unknown ones are left out; the log names both."""


FEATURES = (
    Feature(
        "gradient accumulation",
        "train",
        lambda train: train.gradient_accumulation > 1,
        ("train.gradient_accumulation=4",),
    ),
    Feature(
        "batch ramp",
        "train",
        lambda train: train.batch_ramp is not None,
        ("train.batch_ramp={double_at_tokens: [1000]}",),
        excludes=(
            Excludes(
                "pipeline",
                "the number of microbatches, and with it the schedule, would change with the batch",
                "train.batch_ramp does not support a pipeline; set parallel.pipeline=1 ({parallel.pipeline}), or "
                "remove it.",
            ),
        ),
    ),
    Feature(
        "evaluation tasks",
        "train",
        lambda train: bool(train.eval_tasks),
        ("train.eval_tasks=[arc_easy]",),
        excludes=tuple(
            Excludes(
                other,
                "text is generated by devices that each hold whole layers and sequences",
                "train.eval_tasks needs parallel.pipeline and parallel.context of 1; found {parallel.pipeline} and "
                "{parallel.context}; run jaxstack.evaluate on the checkpoints instead.",
            )
            for other in ("pipeline", "context parallelism")
        ),
    ),
)
"""Features of the training loop, see `jaxstack.config.features`."""
