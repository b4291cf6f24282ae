"""Predicts the time of a train step by part (matmuls, attention, communication, ...) from FLOPs, bytes, collectives.

Per microbatch and device, with n tokens of which t devices share a layer:

- matmuls: 2 FLOPs a parameter and token forward and 4 backward, and what `model.remat` computes again, over the rates
  that layers and the output head reach; small dims reach less of it, and reading the weights is a lower bound;
- attention: the kind's own FLOPs (Dao 2023 for causal flash attention), of which 2/7 are forward, over the rate of the
  kernels at this head_dim and at the length that one call of them sees;
- elementwise: norms, residual, rotation, activations, rows of routed experts (`jaxstack.cost_model.routed_experts`),
  casts of weights and the loss as bytes of memory traffic, the optimizer's update (read weight, gradient and state,
  write weight and state), and the gaps between kernels;
- communication: see `jaxstack.cost_model.cluster`; overlapped transfers count by the time that they add to the step;
- bubble: (p - 1)/m of the layers' work for 1F1B and GPipe, (p - 1)/(m v) for the interleaved schedule (Narayanan et al.
  2021), (p - 1)/(3m) for ZB-H1 (Qi et al. 2023) with at least 2p - 1 microbatches.

The parts add up to the time of the step.
"""

import dataclasses

import numpy as np

from jaxstack.cost_model.cluster import Cluster, CollectiveModel, Efficiency, Group, combined_group, group_of
from jaxstack.cost_model.layouts import Floats, LayoutTable
from jaxstack.cost_model.memory import (
    gathers_weights,
    layers_of_slowest_stage,
    layers_of_stage,
    microbatch_tokens_per_device,
    saved_values_per_token,
    stored_parameters,
)
from jaxstack.cost_model.model_shape import ModelShape, RecurrentLayers
from jaxstack.cost_model.routed_experts import RoutedExperts
from jaxstack.models.recurrent import PARTS_OF_DEVICE, Recurrent, StateExchange
from pallas_kernels.attention.context import OVERLAP_LENGTH

PARTS = ("matmul", "attention", "elementwise", "exposed_communication", "bubble")
"""Parts of the time, in the order of tables."""
_FORWARD_SHARE = 2 / 7
"""Forward part of an attention's time: two of the seven matmuls of flash attention."""
SMALL_DIM = 32
"""A matmul whose smallest dim is this wide reaches half of its rate."""
LOGIT_PASSES = 4
"""Passes over the logits in the compute dtype, forward and backward."""


@dataclasses.dataclass(frozen=True)
class StepModel:
    """Predicts the time of train steps of one model on one cluster.

    Attributes:
      shape: the model.
      cluster: the devices.
      efficiency: measured rates.
      tokens: tokens of a global batch.
      length: tokens of a sequence.
      attention_flops: FLOPs of all layers' attention for each token, forward and backward.
      optimizer_bytes: bytes of optimizer state for each trained parameter.
      trained: trained parameters over all; frozen matrices have no weight gradients.
      reduce_bytes: bytes of gradients for each parameter, in the dtype in which they are summed.
      rotates: True if queries and keys are rotated by their positions.
      scanned: `model.scan_layers`.
      prefetch: `parallel.prefetch`.
      wide_ends: number of layers, the first and the last, that FP8 leaves in bfloat16: without a pipeline, with one.
      context_method: `parallel.context_method`.
      copies: True if copy engines may move the weights and gradients of unrolled layers.
      reference: True if a reference model computes each token too, forward only.
    """

    shape: ModelShape
    cluster: Cluster
    efficiency: Efficiency
    tokens: int
    length: int
    attention_flops: float
    optimizer_bytes: float
    trained: float
    reduce_bytes: float
    rotates: bool
    scanned: bool
    wide_ends: tuple[int, int]
    prefetch: bool
    copies: bool
    context_method: str = "auto"
    reference: bool = False

    def parts(self, layouts: LayoutTable) -> dict[str, Floats]:
        """Return the predicted seconds of a step for each layout, by part: matmuls, communication and others."""
        count = layouts["microbatches"]
        layer = self._layer_seconds(layouts)
        head = self._head_seconds(layouts)
        matmul = count * (layer["matmul"] + head["matmul"])
        attention = count * layer["attention"]
        elementwise = count * (layer["elementwise"] + head["elementwise"])
        each = self._exposed_per_microbatch(layouts, layer["matmul"] + layer["attention"] + layer["elementwise"])
        if self.reference:
            again, attention_again = self._recomputed(layouts)
            trained = 2 + min(self.trained, 1)
            matmul = matmul + count * (layer["matmul"] / (trained + again) + head["matmul"] / trained)
            attention = attention * (1 + _FORWARD_SHARE / (1 + _FORWARD_SHARE * attention_again))
            elementwise = elementwise * 4 / 3
            each = each * 4 / 3  # no gradients, one of about three transfers
        work = matmul + attention + elementwise + count * each
        once = self._update_seconds(layouts)
        # Embedding and head run in separate time slots, once for each microbatch, while all stages wait. They
        # do not lengthen the bubble.
        ends = count * (head["matmul"] + head["elementwise"])
        bubble = (work - ends) * bubble_of_work(layouts) + self._ticks(layouts) * self.efficiency.tick_seconds
        backward = (matmul + attention + elementwise) * 2 / 3
        return {
            "matmul": matmul,
            "attention": attention,
            "elementwise": elementwise + once,
            "exposed_communication": count * each + self._exposed_per_step(layouts, backward),
            "bubble": bubble,
        }

    def _layer_seconds(self, layouts: LayoutTable) -> dict[str, Floats]:
        """Return the compute seconds of a stage's layers per microbatch, by part: matmul, attention, elementwise."""
        shape = self.shape
        tensor = layouts["tensor"]
        rows = microbatch_tokens_per_device(layouts, self.tokens)
        layers = layers_of_slowest_stage(shape, layouts)
        again, attention_again = self._recomputed(layouts)
        passes = 2 + min(self.trained, 1) + again
        weights = (shape.layer_parameters + shape.all_experts / layouts["expert"]) / shape.layers / tensor
        matmul = np.maximum(self._matmul_seconds(layouts), weights * 2 / self._memory_rate) * passes
        attention = self.attention_flops / shape.layers * rows / tensor / self._attention_rate(layouts)
        attention = attention * (1 + _FORWARD_SHARE * attention_again)
        # All policies repeat the forward part of the elementwise operations; `none` does only in a scan whose backward
        # pass gathers the weights again (`saved_values_per_token` counts what that saves).
        kept = layouts.remat_in("none") & ~(gathers_weights(layouts) & self.scanned)
        repeated = np.where(kept, 0, 1 / 3)
        moved = self._layer_bytes(layouts) * (1 + repeated)
        elementwise = moved / (self.cluster.memory_bandwidth * self.efficiency.elementwise)
        elementwise = elementwise + self._weight_bytes(layouts) / self._memory_rate + self.efficiency.layer_seconds
        if self.scanned:
            stacked = saved_values_per_token(shape, layouts, scanned=True) * 2 * rows * self.efficiency.scan_passes
            elementwise = elementwise + stacked / self._memory_rate
        found = {"matmul": matmul, "attention": attention, "elementwise": elementwise}
        return {name: layers * seconds for name, seconds in found.items()}

    def _matmul_seconds(self, layouts: LayoutTable) -> Floats:
        """Return the seconds of one pass of a layer's matmuls for one microbatch, such as the forward pass."""
        shape = self.shape
        tensor = layouts["tensor"]
        rows = microbatch_tokens_per_device(layouts, self.tokens)
        narrow = np.minimum(shape.expert_width or shape.feed_forward, min(shape.hidden, shape.query)) / tensor
        narrow = np.minimum(narrow, rows)
        experts = shape.active_expert_parameters * shape.mixtures / shape.layers
        dense = 2 * (shape.active_layer_parameters - experts) * rows / tensor
        seconds = dense / self._rate(layouts, narrow, self.efficiency.matmul_fp8)
        if shape.mixtures:
            routed = self._routed(layouts)
            flops = 2 * experts * rows / tensor * routed.computed / routed.even
            # Experts have a scale for every 128 values, whatever the recipe of the others.
            seconds = seconds + flops / self._rate(layouts, narrow, self.efficiency.matmul_blockwise / routed.padded)
        return seconds

    def _routed(self, layouts: LayoutTable) -> RoutedExperts:
        return RoutedExperts(self.shape, layouts, self.tokens)

    def _weight_bytes(self, layouts: LayoutTable) -> Floats:
        """Return the bytes that a layer moves for its weights in one microbatch, besides its matmuls.

        A weight is read in float32 and cast to the compute dtype, again in the backward pass of a layer that is
        recomputed. A scan stacks gradients in float32 (zeros, the layer's part, which is read in the compute dtype, and
        twice as much to read for their norm and the update), and without recomputation the cast weights (zeros, a part
        written, and read from).
        """
        shape = self.shape
        per_layer = shape.layers * layouts["tensor"]
        experts = shape.all_experts / layouts["expert"] / per_layer
        recomputes = ~layouts.remat_in("none") | gathers_weights(layouts)
        passes = 1 + recomputes
        found = (shape.layer_parameters / per_layer + experts) * 6 * passes
        if shape.mixtures:
            found = found + self._narrowed(layouts) * (self._routed(layouts).weight_bytes - 6) * experts * passes
        if self.scanned:
            stacked = 14 * self.trained + np.where(recomputes, 0, 10)
            stacked = np.where(layouts["pipeline"] > 1, 0, stacked)
            found = found + (shape.layer_parameters / per_layer + experts) * stacked
        return found

    def _head_seconds(self, layouts: LayoutTable) -> dict[str, Floats]:
        """Return the seconds of embedding, head and loss for one microbatch; all pipeline stages wait for them."""
        shape = self.shape
        rows = microbatch_tokens_per_device(layouts, self.tokens) / layouts["tensor"]
        narrow = np.minimum(shape.hidden, rows * layouts["tensor"])
        rate = 1e12 * self.cluster.peak_tflops.bfloat16 * self.efficiency.head * narrow / (narrow + SMALL_DIM)
        moved = (LOGIT_PASSES * shape.vocabulary + 8 * shape.hidden) * 2 * rows
        flops = (4 + 2 * min(self.trained, 1)) * shape.vocabulary * shape.hidden * rows
        heads = 1 + shape.predictions
        return {"matmul": heads * flops / rate, "elementwise": heads * moved / self._memory_rate}

    def _rate(self, layouts: LayoutTable, narrow: Floats, fp8: float) -> Floats:
        """Return, for each parallel layout, the FLOP/s reached by layers' matmuls whose smallest dim is `narrow`.

        FP8 leaves out the first and the last layer.

        Args:
          layouts: the layouts.
          narrow: smallest dim of the matmuls.
          fp8: efficiency of those in FP8.
        """
        peaks = self.cluster.peak_tflops
        wide = peaks.bfloat16 * self.efficiency.matmul
        fast = wide if peaks.float8 is None else peaks.float8 * fp8
        narrowed = self._narrowed(layouts)
        return 1e12 / ((1 - narrowed) / wide + narrowed / fast) * narrow / (narrow + SMALL_DIM)

    def _narrowed(self, layouts: LayoutTable) -> Floats:
        """Return the share of the layers that compute in FP8."""
        return np.where(layouts["fp8"] > 0, 1 - self._wide_share(layouts), 0.0)

    def _wide_share(self, layouts: LayoutTable) -> Floats:
        """Return the share of the layers that FP8 leaves in bfloat16."""
        plain, staged = self.wide_ends
        return np.where(layouts["pipeline"] > 1, staged, plain) / self.shape.layers

    def _attention_rate(self, layouts: LayoutTable) -> Floats:
        """Return, for each parallel layout, the FLOP/s that attention reaches, interpolated between measured head_dims.

        With c devices along `context` each kernel call sees one of the 2c chunks into which a sequence is cut.
        """
        efficiency = self.efficiency
        context = layouts["context"]
        wide = np.interp(self.shape.head_dim, [64, 128], [efficiency.attention_64, efficiency.attention_128])
        length = self.length / np.where(context > 1, 2 * context, 1)
        share = length / (length + efficiency.attention_half_length)
        return 1e12 * self.cluster.peak_tflops.bfloat16 * wide * share

    @property
    def _memory_rate(self) -> float:
        return self.cluster.memory_bandwidth * self.efficiency.copy_rate

    def _recomputed(self, layouts: LayoutTable) -> tuple[Floats, Floats]:
        """Return (fraction of a layer's forward matmuls, fraction of its attention) recomputed in the backward pass."""
        shape = self.shape
        # The last matmul of the MLP is not needed: its result is only added.
        share = 1 - shape.down_parameters / shape.active_layer_parameters
        matmuls = np.where(layouts.remat_in("none", "save_dots"), 0.0, share)
        return matmuls, np.where(layouts.remat_in("full", "offload"), 1.0, 0.0)

    def _layer_bytes(self, layouts: LayoutTable) -> Floats:
        """Return the bytes that a layer's elementwise operations move for a microbatch, forward and backward."""
        shape = self.shape
        tensor = layouts["tensor"]
        rows = microbatch_tokens_per_device(layouts, self.tokens)
        stream = np.where(layouts["sequence"] > 0, tensor, 1)
        # A plain MLP's bias and activation are computed in the epilogues of its matmuls.
        passes = 11 if shape.gated else 3
        turns = 6 if self.rotates else 2
        mixture = shape.mixtures / shape.layers
        width = shape.active_width - mixture * shape.routed * shape.expert_width
        values = 24 * shape.hidden / stream
        values = values + (passes * width + turns * (shape.query + 2 * shape.key)) / tensor
        moved = 2 * values * rows
        if shape.mixtures:
            routed = self._routed(layouts)
            inner = 2 * passes * routed.activation_values / tensor
            quantized = self._narrowed(layouts) * routed.quantized_bytes
            moved = moved + mixture * (inner + routed.copied_bytes + quantized)
        return moved

    def _update_seconds(self, layouts: LayoutTable) -> Floats:
        """Return the seconds of the optimizer's update, and of adding up gradients over microbatches."""
        local = stored_parameters(self.shape, layouts, zero_from=1)
        moved = self.trained * (12 + 2 * self.optimizer_bytes) * local
        several = (layouts["microbatches"] > 1) & (layouts["pipeline"] == 1)
        sums = self.trained * stored_parameters(self.shape, layouts, zero_from=2) * 12 * layouts["microbatches"]
        return (moved + np.where(several, sums, 0)) / self._memory_rate

    # Communication

    @property
    def _collective_model(self) -> CollectiveModel:
        return CollectiveModel(self.cluster, self.efficiency.link, self.efficiency.network)

    def _groups(self, layouts: LayoutTable) -> dict[str, Group]:
        """Return the device group of each mesh axis; `tensor` is the innermost axis, `pipeline` the outermost."""
        found = {}
        stride = np.ones(len(layouts))
        for axis in ("tensor", "context", "expert", "fsdp", "data", "pipeline"):
            found[axis] = group_of(layouts[axis], stride, self.cluster.gpus_per_host)
            stride = stride * layouts[axis]
        return found

    def _exposed_per_microbatch(self, layouts: LayoutTable, compute: Floats) -> Floats:
        """Return the seconds that communication adds to a microbatch: what is not hidden, and what it slows down."""
        layers = layers_of_stage(self.shape, layouts)
        groups = self._groups(layouts)
        weights = layers * self._weight_seconds(layouts, groups)
        efficiency = self.efficiency
        cost = efficiency.transfers if not self.scanned or self.prefetch else efficiency.transfers_scanned
        exposed = weights + np.minimum(weights, compute) * (cost - 1)
        exposed = exposed + layers * self._tensor_seconds(layouts, groups)
        exposed = exposed + layers * self._context_seconds(layouts, groups, compute / layers)
        exposed = exposed + self._expert_seconds(layouts, groups)
        offloaded = layouts.remat_in("offload", "save_attention_offload") * layers * self.shape.hidden
        copied = 4 * offloaded * microbatch_tokens_per_device(layouts, self.tokens) / self.cluster.host_bandwidth
        exposed = exposed + np.maximum(copied - compute, 0)
        boundary = microbatch_tokens_per_device(layouts, self.tokens) * self.shape.hidden * 2 / layouts["tensor"]
        return exposed + 2 * layouts["chunks"] * self._collective_model.send(boundary, groups["pipeline"])

    def _weight_seconds(self, layouts: LayoutTable, groups: dict[str, Group]) -> Floats:
        """Return the seconds per microbatch to all-gather one layer's weights twice and reduce-scatter its gradient."""
        shape = self.shape
        model = self._collective_model
        group = combined_group(groups["fsdp"], groups["context"])
        per_layer = shape.layers * layouts["tensor"]
        experts = shape.all_experts / layouts["expert"] / per_layer
        size = shape.layer_parameters / per_layer + experts
        itemsize = np.where(layouts["fp8"] > 0, 1 + self._wide_share(layouts), 2)
        moved = itemsize * shape.layer_parameters / per_layer + 2 * experts
        # Copy engines send gradients as they were computed.
        others = layouts["tensor"] * layouts["expert"] * layouts["pipeline"]
        copied = self.copies and not self.scanned and self.cluster.hosts == 1
        reduced = np.where(copied & (others == 1), 2 * self.trained, self.reduce_bytes)
        gathered = 2 * model.all_gather(moved, group) + model.reduce_scatter(reduced * size, group)
        # ZeRO 2 reduce-scatters each layer's gradient over `data` in each microbatch.
        local = size / group.size
        scattered = model.reduce_scatter(self.reduce_bytes * local, groups["data"])
        return gathered + np.where(layouts["zero"] == 2, scattered, 0)

    def _exposed_per_step(self, layouts: LayoutTable, backward: Floats) -> Floats:
        """Return the seconds of once-per-step communication (mostly gradient sums) that computation does not hide.

        `data` sums the gradients while the backward pass goes on, unless they are accumulated or ZeRO 1 shards them.
        """
        shape = self.shape
        model = self._collective_model
        groups = self._groups(layouts)
        tensor = layouts["tensor"]
        experts = layouts["expert"]
        weights = combined_group(groups["fsdp"], groups["context"])
        per_stage = layers_of_stage(shape, layouts) / shape.layers
        local = (shape.layer_parameters + shape.all_experts / experts) * per_stage / tensor / weights.size
        summed = model.all_reduce(self.reduce_bytes * local, groups["data"])
        scattered = model.reduce_scatter(self.reduce_bytes * local, groups["data"])
        copies = model.all_gather(2 * local, groups["data"])
        sums = np.select([layouts["zero"] == 0, layouts["zero"] == 1], [summed, scattered], 0.0)
        early = (layouts["microbatches"] == 1) & (layouts["zero"] == 0)
        cost = np.where(early, self.efficiency.transfers, 1.0)
        exposed = sums + np.minimum(sums, backward) * (cost - 1) + np.where(layouts["zero"] > 0, copies, 0)
        dense = shape.layer_parameters * per_stage / tensor / weights.size
        exposed = exposed + model.all_reduce(self.reduce_bytes * dense, groups["expert"])
        return exposed + self._table_seconds(layouts, groups, weights)

    def _table_seconds(self, layouts: LayoutTable, groups: dict[str, Group], weights: Group) -> Floats:
        """Return the seconds to all-gather embedding and head once per step, and to sum their gradients."""
        model = self._collective_model
        size = self.shape.tables / layouts["tensor"]
        across = combined_group(weights, groups["pipeline"])
        seconds = model.all_gather(2 * size, across) + model.reduce_scatter(self.reduce_bytes * size, across)
        summed = model.all_reduce(
            self.reduce_bytes * size / across.size, combined_group(groups["data"], groups["expert"])
        )
        return seconds + summed

    def _tensor_seconds(self, layouts: LayoutTable, groups: dict[str, Group]) -> Floats:
        """Return the seconds of a layer's tensor-parallel collectives per microbatch, forward and backward.

        Each of the two passes has two all-gathers and two reduce-scatters, or without sequence parallelism two
        all-reduces; recomputation adds to them.
        """
        model = self._collective_model
        group = groups["tensor"]
        size = microbatch_tokens_per_device(layouts, self.tokens) * self.shape.hidden * 2
        again = np.where(layouts.remat_in("none", "save_dots"), 0, 1)
        pairs = model.all_gather(size, group) + model.reduce_scatter(size, group)
        split = 4 * pairs + again * (2 * model.all_gather(size, group) + model.reduce_scatter(size, group))
        whole = (4 + again) * model.all_reduce(size, group)
        return np.where(layouts["sequence"] > 0, split, whole)

    def _context_seconds(self, layouts: LayoutTable, groups: dict[str, Group], compute: Floats) -> Floats:
        """Return the seconds that a layer, in the mean, waits for other devices of `context`, forward and backward."""
        shape = self.shape
        found = shape.attending * self._attention_over_context(layouts, groups, compute)
        for layers in shape.recurrent:
            found = found + layers.number * self._states_over_context(layouts, groups, layers)
        return found / shape.layers

    def _states_over_context(self, layouts: LayoutTable, groups: dict[str, Group], layers: RecurrentLayers) -> Floats:
        """Return the seconds that a recurrence over `context` adds, forward and backward.

        By the mixer's own choice: an all-to-all of a token's inputs and outputs in both passes; or an all-gather of the
        maps of the states in float32 and a reduce-scatter of their gradients, for which gated DeltaNet computes the
        recurrence a second time. Nothing hides either.
        """
        model = self._collective_model
        group = groups["context"]
        rows = microbatch_tokens_per_device(layouts, self.tokens)
        found = np.zeros(len(layouts))
        for devices, tensor in {(int(n), int(t)) for n, t in zip(group.size, layouts["tensor"], strict=True) if n > 1}:
            length = self.length // devices
            exchange = layers.kind.exchange(tensor)
            if self._gathers_states(layers.kind, exchange, length, devices, tensor):
                maps = rows / length * PARTS_OF_DEVICE * devices * exchange.state_bytes
                again = exchange.recomputes * layers.flops * rows / tensor / self._attention_rate(layouts)
                seconds = model.all_gather(maps, group) + model.reduce_scatter(maps, group) + again
            else:
                seconds = 2 * model.all_to_all(2 * exchange.token_numbers * rows, group)
            found = np.where((group.size == devices) & (layouts["tensor"] == tensor), seconds, found)
        return found

    def _gathers_states(self, kind: Recurrent, exchange: StateExchange, length: int, devices: int, tensor: int) -> bool:
        """Return True if a recurrence gathers maps of states, as `jaxstack.models.mixers.context_states` decides."""
        if self.context_method != "auto":
            return self.context_method == "all_gather"
        heads = kind.num_heads // tensor
        return kind.fits_parts(length) and exchange.gathers_states(length, heads, devices, 2)

    def _attention_over_context(self, layouts: LayoutTable, groups: dict[str, Group], compute: Floats) -> Floats:
        """Return the seconds that one layer's attention over `context` waits for other devices, forward and backward.

        By the method that `context_attention` chooses for a causal mask:

        - a ring for long sequences: both passes send keys and values on, the backward also their gradients in float32.
          A hop is hidden behind the attention to the keys before it (Liu et al. 2023);
        - all-to-all where it sends less than all-gathers: queries, keys, values and outputs in both passes;
        - all-gather: keys and values in both passes, and a reduce-scatter of their gradients in float32. Attention
          needs all of them, so that nothing is hidden.

        Where keys and values come from a latent, ring and all-gather send the latent if that takes less time: what
        arrives is expanded once in the forward, and in the backward once more and with gradients. All-to-all is then
        chosen if it is faster than the all-gather.
        """
        model = self._collective_model
        group = groups["context"]
        shape = self.shape
        rows = microbatch_tokens_per_device(layouts, self.tokens)
        devices = group.size
        hops = np.maximum(devices - 1, 0)
        tensor = layouts["tensor"]
        keys, queries = (rows * 2 * width / tensor for width in (shape.attending_key, shape.attending_query))

        def ring(size: Floats, expansion: Floats) -> Floats:
            sent = hops * (2 * model.send(size, group) + model.send(2 * size, group))
            busy = compute + expansion
            return expansion + np.maximum(sent - busy, 0) + 0.1 * np.minimum(sent, busy)

        def gathered(size: Floats, expansion: Floats) -> Floats:
            whole = size * devices
            return 2 * model.all_gather(whole, group) + model.reduce_scatter(2 * whole, group) + expansion

        nothing = np.zeros(len(layouts))
        exchanged = 2 * model.all_to_all(2 * (queries + keys), group)
        width = shape.attending_key
        fewer = (shape.attending_query + width < width * devices) & (width // shape.head_dim % devices == 0)
        in_ring = ring(2 * keys, nothing)
        gathering = gathered(2 * keys, nothing)
        if shape.key_source:
            expansion = (
                hops
                * rows
                * 4
                * 2
                * shape.expansion
                / tensor
                / self._rate(layouts, nothing + shape.key_source, self.efficiency.matmul_fp8)
            )
            source = rows * 2 * shape.key_source + nothing
            in_ring = np.minimum(in_ring, ring(source, expansion))
            gathering = np.minimum(gathering, gathered(source, expansion))
            fewer = (exchanged < gathering) & (shape.heads % devices == 0)
        long = self.length / devices * shape.attending_query / max(width, 1) >= OVERLAP_LENGTH
        return np.select([devices == 1, long, fewer], [0.0, in_ring, exchanged], gathering)

    def _expert_seconds(self, layouts: LayoutTable, groups: dict[str, Group]) -> Floats:
        """Return the seconds of the all-to-alls for a stage's experts: two forward, two backward, one if recomputed."""
        shape = self.shape
        rows = microbatch_tokens_per_device(layouts, self.tokens)
        if not shape.mixtures:
            return np.zeros(len(layouts))
        size = rows * shape.routed * shape.hidden * 2 * shape.exchange_factor
        times = np.where(layouts.remat_in("none", "save_dots"), 4, 5)
        mixtures = layers_of_stage(shape, layouts) * shape.mixtures / shape.layers
        return mixtures * times * self._collective_model.all_to_all(size, groups["expert"])

    def _ticks(self, layouts: LayoutTable) -> Floats:
        """Return the number of time slots of the pipeline schedule, forward and backward."""
        stages = layouts["pipeline"]
        chunks = layouts["chunks"]
        slots = 2 * (layouts["microbatches"] * chunks + (chunks + 1) * stages - 2)
        return np.where(stages > 1, slots * np.where(layouts.schedule_in("zero_bubble"), 1.5, 1.0), 0)


def bubble_of_work(layouts: LayoutTable) -> Floats:
    """Return the pipeline bubble: a stage's idle time divided by its busy time."""
    stages = layouts["pipeline"]
    count = layouts["microbatches"]
    chunks = layouts["chunks"]
    plain = (stages - 1) / count
    # ZB-H1 fills the bubble with weight gradients of enough microbatches, and not with those that recompute a layer.
    fills = layouts.schedule_in("zero_bubble") & (count >= 2 * stages - 1) & layouts.remat_in("none", "save_dots")
    return np.select([fills, layouts.schedule_in("interleaved")], [plain / 3, plain / chunks], plain)
