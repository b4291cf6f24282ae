// The Transformer: prompts in parts of 64 tokens, then one token at a time, with a cache of keys and values.
//
// Every product of matrices, those of attention included, is a call of a tuned kernel (kernels.js). The cache is kept
// in the kernels' panels: keys in panels of positions, values in panels of a head's elements.

import { compile, emitExponentials } from "./kernels.js";
import { angles, checkTokens, PART } from "./model.js";
import { scratchBytes, Tuner } from "./tune.js";

const PAGE = 65536;

/** x times the normal distribution function, e = exp(-x^2 / 2); erf by Abramowitz and Stegun 7.1.26, error 2e-7. */
function exactGelu(x, e) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x) * Math.SQRT1_2);
  const series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  return 0.5 * x * (1 + Math.sign(x) * (1 - series * e));
}

/** Activations as functions of x and of e = exp(argument(x)); those without an argument need no e. */
const ACTIVATIONS = {
  silu: { argument: x => -x, value: (x, e) => x / (1 + e) },
  gelu: { argument: x => -0.5 * x * x, value: exactGelu },
  gelu_tanh: {
    argument: x => 2 * Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x), // tanh(y) = 1 - 2 / (1 + exp(2 y))
    value: (x, e) => x - x / (1 + e),
  },
  relu: { value: x => Math.max(x, 0) },
  relu_squared: { value: x => Math.max(x, 0) ** 2 },
};

/** A matrix [k, n] in panels of 4 nv columns. */
class Packed {
  constructor(engine, k, n, stride) {
    const { nv, one, many } = engine.tuner.choose(k, n, stride);
    Object.assign(this, { k, n, width: 4 * nv, one, many });
    this.panels = Math.ceil(n / this.width);
    this.stride = 4 * this.panels * this.width; // bytes of a row of products
    this.panelBytes = 4 * k * this.width;
    this.address = engine.allocate(this.panels * this.panelBytes);
    this.data = engine.floats(this.address, this.panels * k * this.width);
  }

  /** Copies an array [k, columns] with the given strides to the columns from `first` on. */
  fill(array, columns, rowStride, columnStride, first) {
    const { k, width, data } = this;
    for (let n = 0; n < columns; n++) {
      const column = first + n;
      let to = Math.floor(column / width) * k * width + (column % width), from = n * columnStride;
      for (let row = 0; row < k; row++, to += width, from += rowStride) data[to] = array[from];
    }
    return this;
  }

  /** Copies one column, a row of the transposed matrix, to `target` from `start` on. */
  column(n, target, start) {
    const { k, width, data } = this;
    let from = Math.floor(n / width) * k * width + (n % width);
    for (let row = 0; row < k; row++, from += width) target[start + row] = data[from];
  }

  /** Multiplies m rows at the address x, with `xStride` bytes a row; writes rows of `stride` bytes. */
  multiply(x, xStride, out, m) {
    const kernel = m === 1 ? this.one : this.many;
    kernel(x, xStride, this.address, this.panelBytes, out, this.stride, m, this.k, this.panels);
  }
}

/** A model in WebAssembly memory, with its cache. */
export class Engine {
  /**
   * @param config model.json.
   * @param tensors of `readTensors`.
   * @param capacity tokens that the cache has room for.
   * @param budget least time of one measurement in milliseconds.
   */
  constructor(config, tensors, capacity, budget) {
    this.config = config;
    this.capacity = Math.ceil(capacity / 96) * 96; // whole panels of every width
    const { hidden, heads, kvHeads, width, feedForward, gated, vocabulary } = config;
    const upWidth = (gated ? 2 : 1) * feedForward;
    const shapes = { // [k, n], and the bytes between rows of x if they are known
      qkv: [hidden, (heads + 2 * kvHeads) * width, 4 * hidden], out: [heads * width, hidden, 4 * heads * width],
      up: [hidden, upWidth, 4 * hidden], down: [feedForward, hidden, 4 * (upWidth + 96)], head: [hidden, vocabulary],
      scores: [width, this.capacity], mix: [Math.min(this.capacity, 384), width],
    };
    const scratch = scratchBytes(Object.values(shapes));
    const widest = Math.max(hidden, this.capacity, heads * width, shapes.qkv[1], shapes.up[1]) + 192;
    const weights = Object.values(tensors).reduce((sum, { data }) => sum + data.byteLength, 0);
    const panelEnds = 4 * 96 * (hidden + feedForward + heads * width) * config.layers;
    const cache = 8 * config.layers * kvHeads * this.capacity * (width + 96);
    const buffers = 4 * (8 * Math.max(PART, heads) * widest + vocabulary + 192);
    const total = weights + panelEnds + 4 * 96 * hidden + cache + scratch + buffers;
    this.memory = new WebAssembly.Memory({ initial: Math.ceil(total / PAGE) + 16 });
    this.exponentials = compile(emitExponentials(), this.memory);
    this.next = 64;
    this.tuner = new Tuner(this.memory, this.allocate(scratch), scratch, budget);
    const panel = 4 * this.tuner.choose(...shapes.up).nv;
    shapes.down[2] = 4 * Math.ceil(upWidth / panel) * panel;
    for (const shape of Object.values(shapes)) this.tuner.choose(...shape);
    this.pack(tensors, shapes);
    this.makeBuffers(shapes);
    this.report = this.tuner.report;
    this.candidates = this.tuner.kernels.length;
  }

  allocate(bytes) {
    const address = this.next;
    this.next = Math.ceil((address + bytes) / 64) * 64;
    const missing = this.next - this.memory.buffer.byteLength;
    if (missing > 0) throw new Error(`the model needs ${missing} bytes more than were reserved`);
    return address;
  }

  floats(address, count) {
    return new Float32Array(this.memory.buffer, address, count);
  }

  pack(tensors, shapes) {
    const { config } = this, find = name => tensors[name]?.data;
    const side = (path, names, [k, n, stride]) => {
      const packed = new Packed(this, k, n, stride), parts = names.map(name => find(`${path}/${name}/kernel`));
      let first = 0;
      const biases = names.map(name => find(`${path}/${name}/bias`));
      const bias = biases[0] ? new Float32Array(n) : null;
      parts.forEach((part, i) => {
        const columns = part.length / k;
        packed.fill(part, columns, columns, 1, first);
        if (bias) bias.set(biases[i], first);
        first += columns;
      });
      return { packed, bias };
    };
    const norm = path => find(`${path}/scale`) && { scale: find(`${path}/scale`), bias: find(`${path}/bias`) };
    this.layers = Array.from({ length: config.layers }, (_, i) => {
      const path = `decoder/layers/${i}`;
      return {
        window: config.windows[i], attentionNorm: norm(`${path}/attention_norm`), mlpNorm: norm(`${path}/mlp_norm`),
        attentionPostNorm: norm(`${path}/attention_post_norm`), mlpPostNorm: norm(`${path}/mlp_post_norm`),
        queryNorm: norm(`${path}/attention/q_norm`), keyNorm: norm(`${path}/attention/k_norm`),
        qkv: side(`${path}/attention`, ["q_proj", "k_proj", "v_proj"], shapes.qkv),
        out: side(`${path}/attention`, ["o_proj"], shapes.out),
        up: side(`${path}/mlp`, config.gated ? ["gate_proj", "up_proj"] : ["up_proj"], shapes.up),
        down: side(`${path}/mlp`, ["down_proj"], shapes.down),
        ...this.makeCache(shapes),
      };
    });
    this.finalNorm = norm("final_norm");
    this.positions = find("position_embedding/table");
    this.table = config.tied ? null : find("embedding/table");
    const [k, n] = shapes.head;
    this.head = new Packed(this, k, n);
    if (config.tied) this.head.fill(find("embedding/table"), n, 1, k, 0);
    else this.head.fill(find("head"), n, n, 1, 0);
  }

  /** Reserves the keys and values of one layer. */
  makeCache(shapes) {
    const { kvHeads, width } = this.config;
    const keys = this.tuner.choose(...shapes.scores), values = this.tuner.choose(...shapes.mix);
    const valuePanels = Math.ceil(width / (4 * values.nv));
    const keyBytes = 4 * width * this.capacity, valueBytes = 16 * values.nv * valuePanels * this.capacity;
    const reserve = bytes => {
      const address = this.allocate(kvHeads * bytes);
      return { address, bytes, data: this.floats(address, (kvHeads * bytes) / 4) };
    };
    return {
      keys: { ...reserve(keyBytes), ...keys },
      values: { ...reserve(valueBytes), ...values, panels: valuePanels },
    };
  }

  makeBuffers(shapes) {
    const { hidden, heads } = this.config, rows = Math.max(PART, heads);
    const buffer = count => {
      const address = this.allocate(4 * count);
      return { address, data: this.floats(address, count) };
    };
    const padded = n => Math.ceil(n / 96) * 96 + 96;
    this.x = buffer(PART * hidden);
    this.normalized = buffer(PART * hidden);
    this.qkv = buffer(PART * padded(shapes.qkv[1]));
    this.scores = buffer(rows * padded(this.capacity));
    this.mixed = buffer(rows * padded(this.config.width));
    this.attended = buffer(PART * shapes.out[0]);
    this.wide = buffer(PART * padded(shapes.up[1]));
    this.gates = buffer(padded(this.config.feedForward));
    this.update = buffer(PART * padded(hidden));
    this.logitRow = buffer(padded(shapes.head[1]));
  }

  /** Runs tokens at the positions from `start` on; returns the logits after the last one, valid until the next call. */
  run(tokens, start) {
    checkTokens(tokens, start, this.config, this.capacity);
    for (let first = 0; first < tokens.length; first += PART)
      this.runPart(tokens.slice(first, first + PART), start + first);
    const last = ((tokens.length - 1) % PART) * this.config.hidden;
    const { data } = this.x, { hidden, vocabulary, finalCap } = this.config;
    this.normalize(this.finalNorm, data, last, this.normalized.data, 0, hidden, 1);
    this.head.multiply(this.normalized.address, 4 * hidden, this.logitRow.address, 1);
    const logits = this.logitRow.data.subarray(0, vocabulary);
    if (finalCap) for (let i = 0; i < vocabulary; i++) logits[i] = Math.tanh(logits[i] / finalCap) * finalCap;
    return logits;
  }

  runPart(tokens, start) {
    const { hidden, localFrequencies, frequencies } = this.config, count = tokens.length;
    this.embed(tokens, start);
    const turns = frequencies && angles(frequencies, start, count);
    const local = localFrequencies ? angles(localFrequencies, start, count) : turns;
    for (const layer of this.layers) {
      this.normalize(layer.attentionNorm, this.x.data, 0, this.normalized.data, 0, hidden, count);
      this.attention(layer, start, count, layer.window ? local : turns);
      this.addUpdate(layer.attentionPostNorm, layer.out.packed.stride / 4, count);
      this.normalize(layer.mlpNorm, this.x.data, 0, this.normalized.data, 0, hidden, count);
      this.feedForward(layer, count);
      this.addUpdate(layer.mlpPostNorm, layer.down.packed.stride / 4, count);
    }
  }

  embed(tokens, start) {
    const { hidden, embeddingScale } = this.config, x = this.x.data;
    tokens.forEach((token, row) => {
      const to = row * hidden;
      if (this.table) x.set(this.table.subarray(token * hidden, (token + 1) * hidden), to);
      else this.head.column(token, x, to);
      if (embeddingScale !== 1) for (let i = 0; i < hidden; i++) x[to + i] *= embeddingScale;
      const position = (start + row) * hidden;
      if (this.positions) for (let i = 0; i < hidden; i++) x[to + i] += this.positions[position + i];
    });
  }

  /** Normalizes `count` rows of `size` elements, from `from` in `source` to `to` in `target`. */
  normalize({ scale, bias }, source, from, target, to, size, count) {
    const { normEps, normOffset } = this.config;
    for (let row = 0; row < count; row++, from += size, to += size) {
      let mean = 0, square = 0;
      if (bias) {
        for (let i = 0; i < size; i++) mean += source[from + i];
        mean /= size;
      }
      for (let i = 0; i < size; i++) square += (source[from + i] - mean) ** 2;
      const factor = 1 / Math.sqrt(square / size + normEps);
      for (let i = 0; i < size; i++) {
        const value = (source[from + i] - mean) * factor * (scale[i] + (bias ? 0 : normOffset));
        target[to + i] = bias ? value + bias[i] : value;
      }
    }
  }

  /** Adds a bias to rows with `stride` elements. */
  addBias(bias, data, stride, count) {
    if (!bias) return;
    for (let row = 0; row < count; row++)
      for (let i = 0, at = row * stride; i < bias.length; i++, at++) data[at] += bias[i];
  }

  addUpdate(postNorm, stride, count) {
    const { hidden } = this.config, { data } = this.update, x = this.x.data;
    for (let row = 0; row < count; row++) {
      const at = row * stride;
      if (postNorm) this.normalize(postNorm, data, at, data, at, hidden, 1);
      for (let i = 0, to = row * hidden; i < hidden; i++, to++) x[to] += data[at + i];
    }
  }

  attention(layer, start, count, turns) {
    const { hidden, heads, kvHeads, width, scale } = this.config, { packed, bias } = layer.qkv;
    const stride = packed.stride / 4, { data, address } = this.qkv;
    packed.multiply(this.normalized.address, 4 * hidden, address, count);
    this.addBias(bias, data, stride, count);
    for (let row = 0; row < count; row++) {
      for (let head = 0; head < heads + kvHeads; head++) {
        const at = row * stride + head * width, norm = head < heads ? layer.queryNorm : layer.keyNorm;
        if (norm) this.normalize(norm, data, at, data, at, width, 1);
        if (turns) this.rotate(data, at, turns, row);
      }
      for (let i = 0, at = row * stride; i < heads * width; i++, at++) data[at] *= scale;
      this.store(layer, data, row * stride + heads * width, start + row);
    }
    const group = heads / kvHeads;
    for (let head = 0; head < heads; head += count === 1 ? group : 1) {
      // One token's query heads that share a key head are the rows of one product.
      const rows = count === 1 ? group : count, xStride = count === 1 ? 4 * width : packed.stride;
      this.attend(layer, address + 4 * head * width, xStride, rows, Math.floor(head / group), start, count);
      const from = this.mixed.data, fromStride = 4 * layer.values.nv * layer.values.panels;
      for (let row = 0; row < rows; row++) {
        const to = count === 1 ? (head + row) * width : row * heads * width + head * width;
        for (let i = 0; i < width; i++) this.attended.data[to + i] = from[row * fromStride + i];
      }
    }
    layer.out.packed.multiply(this.attended.address, 4 * heads * width, this.update.address, count);
    this.addBias(layer.out.bias, this.update.data, layer.out.packed.stride / 4, count);
  }

  rotate(data, at, { cos, sin }, row) {
    const half = this.config.width / 2;
    for (let i = 0; i < half; i++) {
      const c = cos[row * half + i], s = sin[row * half + i], first = data[at + i], second = data[at + half + i];
      data[at + i] = first * c - second * s;
      data[at + half + i] = second * c + first * s;
    }
  }

  /** Writes the keys and values of one position, which are in `data` from `at` on, into the panels. */
  store({ keys, values }, data, at, position) {
    const { kvHeads, width } = this.config, keyWidth = 4 * keys.nv, valueWidth = 4 * values.nv;
    for (let head = 0; head < kvHeads; head++, at += width) {
      const start = (head * keys.bytes) / 4 + (position % keyWidth);
      const panel = start + Math.floor(position / keyWidth) * width * keyWidth;
      for (let i = 0; i < width; i++) keys.data[panel + i * keyWidth] = data[at + i];
      const from = at + kvHeads * width;
      for (let i = 0; i < width; i++) {
        const row = Math.floor(i / valueWidth) * this.capacity + position;
        values.data[(head * values.bytes) / 4 + row * valueWidth + (i % valueWidth)] = data[from + i];
      }
    }
  }

  /** Attends with `rows` queries of one key head; writes to `mixed`. Rows are positions, or heads of one position. */
  attend({ keys, values, window }, queries, xStride, rows, head, start, count) {
    const { width, softCap } = this.config, seen = start + count, keyWidth = 4 * keys.nv;
    const panels = Math.ceil(seen / keyWidth), stride = panels * keyWidth, scores = this.scores.data;
    const kernel = ({ one, many }) => (rows === 1 ? one : many);
    const keyAddress = keys.address + head * keys.bytes, valueAddress = values.address + head * values.bytes;
    const keyPanel = 4 * width * keyWidth, target = this.scores.address;
    kernel(keys)(queries, xStride, keyAddress, keyPanel, target, 4 * stride, rows, width, panels);
    for (let row = 0; row < rows; row++) {
      const newest = count === 1 ? start : start + row, oldest = window ? Math.max(0, newest - window + 1) : 0;
      this.softmax(scores, row * stride, seen, oldest, newest, softCap);
    }
    const panelBytes = 16 * values.nv * this.capacity, outStride = 16 * values.nv * values.panels, out = this.mixed.address;
    kernel(values)(target, 4 * stride, valueAddress, panelBytes, out, outStride, rows, seen, values.panels);
  }

  feedForward(layer, count) {
    const { hidden, feedForward, gated, activation } = this.config, act = ACTIVATIONS[activation];
    const { packed, bias } = layer.up, { data, address } = this.wide, stride = packed.stride / 4;
    packed.multiply(this.normalized.address, 4 * hidden, address, count);
    this.addBias(bias, data, stride, count);
    for (let row = 0; row < count; row++) this.activate(data, row * stride, feedForward, gated, act);
    layer.down.packed.multiply(address, packed.stride, this.update.address, count);
    this.addBias(layer.down.bias, this.update.data, layer.down.packed.stride / 4, count);
  }

  /** Replaces `size` elements from `at` on by their activation, times the `size` elements after them if it is gated. */
  activate(data, at, size, gated, { argument, value }) {
    const { data: e, address } = this.gates;
    if (argument) {
      for (let i = 0; i < size; i++) e[i] = argument(data[at + i]);
      this.exponentials(address, address, Math.ceil(size / 4) * 4);
    }
    for (let i = 0; i < size; i++) {
      const activated = value(data[at + i], e[i]);
      data[at + i] = gated ? activated * data[at + i + size] : activated;
    }
  }

  /** Turns scores of the positions oldest..newest into weights; all others of `seen` become 0. */
  softmax(scores, at, seen, oldest, newest, cap) {
    let most = -Infinity, sum = 0;
    for (let i = at + oldest; i <= at + newest; i++) {
      if (cap) scores[i] = Math.tanh(scores[i] / cap) * cap;
      if (scores[i] > most) most = scores[i];
    }
    for (let i = at + oldest; i <= at + newest; i++) scores[i] -= most;
    const first = at + (oldest & ~3), address = scores.byteOffset + 4 * first; // rows begin at multiples of four
    this.exponentials(address, address, Math.ceil((at + newest + 1 - first) / 4) * 4);
    for (let i = at + oldest; i <= at + newest; i++) sum += scores[i];
    const factor = 1 / sum;
    for (let i = at; i < at + seen; i++) scores[i] = i < at + oldest || i > at + newest ? 0 : scores[i] * factor;
  }
}
