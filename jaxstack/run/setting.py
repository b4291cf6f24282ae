"""Opens what a run computes on: devices, mesh, sharding rules and dtypes, with the layout of training or decoding."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxstack.config.sections import TrainConfig
from jaxstack.cost_model.cluster import Cluster, cluster_of_devices, parse_cluster, resized
from jaxstack.cost_model.forecast import Forecast, forecast
from jaxstack.cost_model.search import search_layouts
from jaxstack.distributed.cluster import fewer_count, full_count
from jaxstack.distributed.coordination import all_gather
from jaxstack.distributed.device_setup import DEVICE_FRACTION, cache_compilations, memory_per_device, start_devices
from jaxstack.distributed.xla_options import low_precision_cpu_options, supports_peer_copies
from jaxstack.errors import ConfigError
from jaxstack.parallel import AxisRules, StepLayout, make_mesh, make_rules
from jaxstack.parallel.config import ParallelConfig
from jaxstack.parallel.fewer_devices import describe_change, fit_fewer_devices
from jaxstack.parallel.layout_rules import serving_degrees, serving_problems
from jaxstack.parallel.rules import WHOLE_EXPERTS
from jaxstack.parallel.weight_gather import in_one_process, share_host
from jaxstack.resilience.preflight import check_same_devices, check_same_memory
from jaxstack.run_config import RunConfig

Purpose: TypeAlias = Literal["train", "evaluate", "decode", "serve"]
"""Purpose for which devices are opened; each has its own choice of layout."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Configuration of a run with its parallel layout filled in, and the device mesh of its computation.

    Attributes:
      config: configuration whose parallel degrees are those of the mesh.
      mesh: device mesh; with an `AbstractMesh` a run can be described, but not computed.
      change: what differs from the layout on all processes, if the run goes on with fewer of them; otherwise "".
      axis_rules: logical axis -> mesh axes, where they differ from the standard rules.
    """

    config: RunConfig
    mesh: Mesh | AbstractMesh
    change: str = ""
    axis_rules: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, config: RunConfig, purpose: Purpose, *, chosen: bool = False, local: bool = False) -> "Setting":
        """Start the devices and the compilation cache, choose the layout, and make the mesh.

        Args:
          config: configuration of the run. Degrees of -1 and `parallel: auto` are filled in.
          purpose: training uses all devices; see `with_evaluation_layout` and `decoding_layout` for the others.
          chosen: True if the user chose the degrees for evaluation or decoding, in place of those of the training.
          local: True if each of several processes decodes by itself, with its own devices.

        Raises:
          ConfigError: the devices cannot be started, or the layout does not fit them, the model or the batch.
          JaxstackError: other programs hold memory of some of the devices.
        """
        devices = start_devices(config.parallel.simulate_devices)
        cache_compilations()
        change = ""
        axis_rules = {}
        if purpose == "train":
            check_same_devices(config.resilience.connect_seconds)
            config, change = _present_layout(config, devices, jax.process_count())
        elif purpose == "evaluate":
            config = with_evaluation_layout(config, devices, chosen=chosen)
        else:
            parallel = decoding_layout(config, jax.local_device_count() if local else devices, chosen=chosen)
            if purpose == "serve":
                if problems := serving_problems(config.model, parallel):
                    raise ConfigError(" ".join(problems))
                axis_rules = WHOLE_EXPERTS if parallel.expert > 1 else {}
                parallel = serving_degrees(parallel)
            config = config.model_copy(update={"parallel": parallel})
        mesh = _mesh(config.parallel, local=local)
        if purpose != "train" and not local:
            _check_every_process(mesh, devices)
            check_same_memory(mesh.local_devices, config.resilience.connect_seconds)
        return cls(config, mesh, change, axis_rules)

    @property
    def platform(self) -> str:
        """Platform of the devices, `gpu` or `cpu`; that of an abstract mesh is `gpu`."""
        return "gpu" if isinstance(self.mesh, AbstractMesh) else self.mesh.devices.flat[0].platform

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the computation."""
        return jnp.dtype(self.config.precision.compute_dtype(self.platform))

    @property
    def rules(self) -> AxisRules:
        """Rules that map logical axes of arrays onto the mesh."""
        return make_rules(cast(Mesh, self.mesh), sequence=self.config.parallel.sequence, overrides=self.axis_rules)

    @property
    def layout(self) -> StepLayout:
        """Parallelization of the train step in addition to its mesh: ZeRO stage, overlap, pipeline, ..."""
        config = self.config
        parallel = config.parallel
        return StepLayout(
            zero=parallel.zero,
            reduce_dtype=config.precision.reduce,
            context_method=None if parallel.context_method == "auto" else parallel.context_method,
            overlap=parallel.overlap,
            prefetch=parallel.prefetch,
            peer_copies=_uses_peer_copies(config, cast(Mesh, self.mesh)),
            pipeline=config.pipeline_plan(),
            sequence=parallel.sequence,
            axis_rules=self.axis_rules,
        )

    @property
    def train(self) -> TrainConfig:
        """The section `train`, with the XLA options that this platform and dtype need."""
        train = self.config.train
        if self.platform != "cpu" or self.dtype.itemsize >= 4:
            return train
        return train.model_copy(update={"xla_options": {**low_precision_cpu_options(), **train.xla_options}})


def open_rules(parallel: ParallelConfig) -> AxisRules:
    """Start the devices; return the sharding rules of a mesh over as many as the degrees need, for work without a run.

    Args:
      parallel: degrees; one of -1 takes the rest of the devices.
    """
    return make_rules(_mesh(_within(parallel, start_devices(parallel.simulate_devices))))


def _check_every_process(mesh: Mesh, devices: int) -> None:
    """Check that a layout has devices of every process, as each computes and reads its part.

    Raises:
      ConfigError: it has not.
    """
    idle = jax.process_count() - len({device.process_index for device in mesh.devices.flat})
    if idle:
        raise ConfigError(
            f"parallel.*: a layout on {mesh.size} of {devices} devices leaves {idle} of {jax.process_count()} "
            f"processes without any; give degrees whose product is {devices}, as parallel.data={devices}, or fewer "
            "processes."
        )


def _mesh(parallel: ParallelConfig, *, local: bool = False) -> Mesh:
    devices = jax.local_devices() if local else jax.devices()
    return make_mesh(parallel, devices[: math.prod(parallel.degrees.values()) * parallel.workers])


def with_training_layout(config: RunConfig, devices: int, cluster: Cluster | None = None) -> RunConfig:
    """Return the configuration with its parallel degrees filled in for `devices` devices.

    With `parallel: auto` the planner chooses the fastest layout that it predicts to fit.

    Args:
      config: configuration of the run.
      devices: number of devices.
      cluster: kind of devices that `parallel: auto` plans for; default: the one of this process.

    Raises:
      ConfigError: degrees, model and batch do not fit together; the message names the nearest that do.
    """
    if config.parallel.auto:
        config = _automatic_layout(config, devices, cluster)
    try:
        resolved = config.model_copy(update={"parallel": config.parallel.resolve(devices)})
    except ConfigError as error:
        hint = config.suggest_layout(max(1, devices // config.parallel.workers))
        raise ConfigError(" ".join(filter(None, [str(error), hint]))) from None
    problems = resolved.layout_problems()
    if problems:
        raise ConfigError(" ".join(filter(None, [*problems, resolved.suggest_layout()])))
    return resolved


def after_loss(config: RunConfig) -> tuple[RunConfig, list[Any], str] | None:
    """Return what a run would go on with after the loss of its last node; None if it would not go on.

    Args:
      config: configuration of the run as given, whose layout is for all nodes; its vocabulary must be set.

    Returns:
      Configuration with the smaller layout, its devices, and how the layout differs from that of all devices.

    Raises:
      ConfigError: the devices that are left do not fit the layout.
    """
    count = fewer_count()
    if count is None:
        return None
    devices = jax.devices()[: jax.device_count() // jax.process_count() * count]
    smaller, change = _present_layout(config, len(devices), count)
    return smaller, devices, change


def _present_layout(config: RunConfig, devices: int, count: int) -> tuple[RunConfig, str]:
    """Return the configuration with the layout of `count` processes, and how it differs from that of all of them.

    Args:
      config: its layout is for all processes.
      devices: number of devices of these processes.
      count: number of processes.
    """
    full = full_count(count)
    if full == count or config.parallel.auto:
        return with_training_layout(config, devices), ""
    whole = with_training_layout(config, devices // count * full)
    parallel, train = fit_fewer_devices(whole.parallel, whole.train, devices)
    change = describe_change((whole.parallel, whole.train), (parallel, train))
    return with_training_layout(whole.model_copy(update={"parallel": parallel, "train": train}), devices), change


def forecast_here(config: RunConfig) -> Forecast | None:
    """Return the predicted memory and step time of a run on this process's devices; None for an unknown device kind.

    With workers it is that of one of them.

    Args:
      config: its degrees and its vocabulary must be set.
    """
    config = config.one_worker
    devices = math.prod(config.parallel.degrees.values())
    kind = jax.devices()[0].device_kind
    cluster = cluster_of_devices(kind, devices, one_host=share_host(jax.devices()))
    return None if cluster is None else forecast(config, cluster)


def _automatic_layout(config: RunConfig, devices: int, cluster: Cluster | None) -> RunConfig:
    """Return the configuration with the layout that the planner predicts to be fastest on `devices` devices."""
    vocabulary = config.model.vocab_size or config.data.tokenizer.vocab_size
    known = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocabulary})}).one_worker
    count = config.parallel.workers
    each = max(1, devices // count)
    best = search_layouts(known, resized(cluster, each) if cluster else _present_cluster(each), top=1).best.config
    parallel = {"workers": count, "simulate_devices": config.parallel.simulate_devices}
    return best.model_copy(
        update={
            "model": best.model.model_copy(update={"vocab_size": config.model.vocab_size}),
            "parallel": best.parallel.model_copy(update=parallel),
            "train": best.train.model_copy(update={"global_batch_size": config.train.global_batch_size}),
            "local_sgd": config.local_sgd,
        }
    )


def _present_cluster(devices: int) -> Cluster:
    """Describe `devices` devices of this process's kind as a cluster, on which the planner can predict layouts.

    A kind that no file describes, such as simulated CPU devices, is taken for an H200. The memory is that of the
    device, which a file may overstate: an A100 has 40 or 80 GB. Of several processes it is that of the one with the
    least, so that all choose the same layout.
    """
    known = cluster_of_devices(jax.devices()[0].device_kind, devices, one_host=share_host(jax.devices()))
    cluster = known or resized(parse_cluster("h200"), devices)
    memory = min(filter(None, all_gather("device-limit", memory_per_device())), default=None)
    return cluster.model_copy(update={"memory_bytes": int(memory / DEVICE_FRACTION)}) if memory else cluster


def with_evaluation_layout(config: RunConfig, devices: int, *, chosen: bool) -> RunConfig:
    """Return the configuration with a layout and batch sizes for measuring the held-out loss on `devices` devices.

    The loss does not depend on the layout. So a run that was trained on another number of devices is evaluated with
    `fsdp` over all devices, unless the user chose a layout.

    Args:
      chosen: True if the user chose the degrees in `config.parallel`; they may use fewer devices than there are.

    Raises:
      ConfigError: the layout does not fit the model or the devices.
    """
    simulated = config.parallel.simulate_devices
    config = config.one_worker
    parallel = config.parallel.model_copy(update={"simulate_devices": simulated})
    if chosen or -1 in parallel.degrees.values():
        parallel = _within(parallel, devices)
    elif math.prod(parallel.degrees.values()) == devices:
        return config
    else:
        parallel = ParallelConfig(fsdp=devices, simulate_devices=simulated)
    train = config.train
    stages = parallel.pipeline
    unit = parallel.data * parallel.fsdp * parallel.expert * (2 * stages if stages > 1 else 1)
    size = train.eval_batch_size or train.global_batch_size // train.gradient_accumulation
    size = -(-size // unit) * unit
    sizes = {"eval_batch_size": size, "global_batch_size": size, "gradient_accumulation": 1}
    config = config.model_copy(update={"parallel": parallel, "train": train.model_copy(update=sizes)})
    if problems := config.layout_problems():
        raise ConfigError(" ".join(problems))
    return config


def decoding_layout(config: RunConfig, devices: int, *, chosen: bool) -> ParallelConfig:
    """Return the parallel degrees for text generation and evaluation tasks on `devices` devices.

    Args:
      chosen: True if the user chose the degrees in `config.parallel`. Otherwise the weights are split over `tensor`,
        by the largest degree up to `devices` that divides the model's key/value heads and widths.

    Raises:
      ConfigError: the chosen layout does not fit the model or the devices.
    """
    if chosen:
        parallel = _within(config.parallel, devices)
        if problems := _decoding_problems(config, parallel):
            raise ConfigError(" ".join(problems))
        return parallel
    degrees = (degree for degree in range(devices, 0, -1) if config.model.kv_heads % degree == 0)
    choices = (ParallelConfig(tensor=degree, overlap=config.parallel.overlap) for degree in degrees)
    found = next(parallel for parallel in choices if parallel.tensor == 1 or not _decoding_problems(config, parallel))
    if jax.process_count() == 1 or devices % found.tensor:
        return found
    return found.model_copy(update={"data": devices // found.tensor})  # no process may be left without a device


def _uses_peer_copies(config: RunConfig, mesh: Mesh) -> bool:
    """Return True if weights and gradients are transferred by the GPUs' copy engines instead of NCCL kernels.

    With `parallel.copy_engines: auto` this holds for layouts where it was measured to be no slower: unrolled
    layers over `data`, `fsdp` and `context` on the GPUs of one process.
    """
    if config.parallel.copy_engines != "auto":
        return config.parallel.copy_engines == "always"
    split = _split_axes(mesh.shape)
    measured = not config.model.scan_layers and split <= {"data", "fsdp", "context"}
    return measured and in_one_process(mesh) and supports_peer_copies()


def _split_axes(shape: Mapping[str, int]) -> set[str]:
    return {axis for axis, degree in shape.items() if degree > 1}


def _within(parallel: ParallelConfig, devices: int) -> ParallelConfig:
    """Return the parallel degrees, with a -1 filled in; raise ConfigError if they need more than `devices` devices."""
    degrees = parallel.degrees.values()
    return parallel if -1 not in degrees and math.prod(degrees) <= devices else parallel.resolve(devices)


def _decoding_problems(config: RunConfig, parallel: ParallelConfig) -> list[str]:
    """Return error messages that say why these parallel degrees do not suit decoding; empty if they do.

    They are checked with the smallest batch that they divide. The stages of a pipeline are any consecutive layers, as
    those of training are not.
    """
    parallel = parallel.model_copy(update={"pipeline": 1})
    rows = parallel.data * parallel.fsdp * parallel.expert
    train = TrainConfig(global_batch_size=rows, sequence_length=2 * parallel.tensor * parallel.context)
    return config.model_copy(update={"parallel": parallel, "train": train}).layout_problems()
