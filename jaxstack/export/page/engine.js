// A model in WebAssembly memory: prompts in parts of 64 tokens, then one token at a time, with a cache of keys and values.
//
// The engine chooses kernels, packs the weights, and says where everything lies; runner.js computes. The cache is kept in
// the kernels' panels: keys in panels of positions, values in panels of a head's elements.

import { angles, checkTokens, PART } from "./model.js";
import { Runner, Team } from "./runner.js";
import { scratchBytes, Tuner } from "./tune.js";

const PAGE = 65536;

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

  /** Copies an array [k, columns] with the given strides, times a factor, to the columns from `first` on. */
  fill(array, columns, rowStride, columnStride, first, factor = 1) {
    const { k, width, data } = this;
    for (let n = 0; n < columns; n++) {
      const column = first + n;
      let to = Math.floor(column / width) * k * width + (column % width), from = n * columnStride;
      for (let row = 0; row < k; row++, to += width, from += rowStride) data[to] = factor * array[from];
    }
    return this;
  }

  /** Copies one column, a row of the transposed matrix, to `target` from `start` on. */
  column(n, target, start) {
    const { k, width, data } = this;
    let from = Math.floor(n / width) * k * width + (n % width);
    for (let row = 0; row < k; row++, from += width) target[start + row] = data[from];
  }

  /** Returns what a runner must know of it. */
  plan() {
    const { address, panelBytes, panels, stride, width, k, n, one, many } = this;
    return { address, panelBytes, panels, stride, width, k, n, one, many };
  }
}

/** A model in WebAssembly memory, with its cache. */
export class Engine {
  /**
   * @param config model.json.
   * @param tensors of `readTensors`.
   * @param capacity tokens that the cache has room for.
   * @param budget least time of one measurement in milliseconds.
   * @param threads for which there is room; `startThreads` starts those besides this one.
   */
  constructor(config, tensors, capacity, budget, threads = 1) {
    this.config = config;
    this.room = threads;
    this.threads = 1; // that run the model
    this.helpers = [];
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
    const buffers = 4 * ((6 + 2 * threads) * Math.max(PART, heads) * widest + vocabulary + 192) + 8 * this.capacity * width;
    const pages = Math.ceil((weights + panelEnds + 4 * 96 * hidden + cache + scratch + buffers) / PAGE) + 16;
    this.pages = threads > 1 ? pages : 0; // of a memory that threads share
    this.memory = new WebAssembly.Memory({ initial: pages, maximum: pages, shared: threads > 1 });
    this.next = 64;
    this.sync = this.allocate(256);
    this.team = new Team(new Int32Array(this.memory.buffer, this.sync, 64), 0, threads);
    this.tuner = new Tuner(this.memory, this.allocate(scratch), scratch, budget, this.pages);
    const panel = 4 * this.tuner.choose(...shapes.up).nv;
    shapes.down[2] = 4 * Math.ceil(upWidth / panel) * panel;
    for (const shape of Object.values(shapes)) this.tuner.choose(...shape);
    this.plan = { config, capacity: this.capacity, pages: this.pages, ...this.pack(tensors, shapes), ...this.makeBuffers(shapes, threads) };
    this.runner = new Runner(this.plan, this.memory, this.team);
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
    const keep = (array, change) => {
      const address = this.allocate(array.byteLength);
      this.floats(address, array.length).set(array.map(change));
      return address;
    };
    const side = (path, names, [k, n, stride]) => {
      const packed = new Packed(this, k, n, stride), parts = names.map(name => find(`${path}/${name}/kernel`));
      let first = 0;
      const biases = names.map(name => find(`${path}/${name}/bias`));
      const bias = biases[0] ? new Float32Array(n) : null;
      parts.forEach((part, i) => {
        const columns = part.length / k, factor = names[i] === scaled ? config.scale : 1;
        packed.fill(part, columns, columns, 1, first, factor);
        if (bias) bias.set(biases[i].map(value => value * factor), first);
        first += columns;
      });
      return { packed: packed.plan(), bias: bias ? keep(bias, value => value) : 0 };
    };
    // Of queries the scale of attention is part of the weights, or of their norm.
    const scaled = find("decoder/layers/0/attention/q_norm/scale") ? null : "q_proj";
    const norm = (path, factor = 1) => {
      const scale = find(`${path}/scale`), bias = find(`${path}/bias`), offset = bias ? 0 : config.normOffset;
      if (!scale) return null;
      return { scale: keep(scale, value => (value + offset) * factor), bias: bias ? keep(bias, value => value * factor) : 0 };
    };
    const layers = Array.from({ length: config.layers }, (_, i) => {
      const path = `decoder/layers/${i}`;
      return {
        window: config.windows[i], attentionNorm: norm(`${path}/attention_norm`), mlpNorm: norm(`${path}/mlp_norm`),
        attentionPostNorm: norm(`${path}/attention_post_norm`), mlpPostNorm: norm(`${path}/mlp_post_norm`),
        queryNorm: norm(`${path}/attention/q_norm`, config.scale), keyNorm: norm(`${path}/attention/k_norm`),
        qkv: side(`${path}/attention`, ["q_proj", "k_proj", "v_proj"], shapes.qkv),
        out: side(`${path}/attention`, ["o_proj"], shapes.out),
        up: side(`${path}/mlp`, config.gated ? ["gate_proj", "up_proj"] : ["up_proj"], shapes.up),
        down: side(`${path}/mlp`, ["down_proj"], shapes.down),
        ...this.makeCache(shapes),
      };
    });
    const finalNorm = norm("final_norm");
    this.positions = find("position_embedding/table");
    this.table = config.tied ? null : find("embedding/table");
    const [k, n] = shapes.head;
    this.head = new Packed(this, k, n);
    if (config.tied) this.head.fill(find("embedding/table"), n, 1, k, 0);
    else this.head.fill(find("head"), n, n, 1, 0);
    return { layers, finalNorm, head: this.head.plan() };
  }

  /** Reserves the keys and values of one layer. */
  makeCache(shapes) {
    const { kvHeads, width } = this.config;
    const keys = this.tuner.choose(...shapes.scores), values = this.tuner.choose(...shapes.mix);
    const valuePanels = Math.ceil(width / (4 * values.nv));
    const keyBytes = 4 * width * this.capacity, valueBytes = 16 * values.nv * valuePanels * this.capacity;
    return {
      keys: { ...keys, bytes: keyBytes, address: this.allocate(kvHeads * keyBytes) },
      values: { ...values, bytes: valueBytes, address: this.allocate(kvHeads * valueBytes), panels: valuePanels },
    };
  }

  /** Reserves what is between the products, for each of the threads if they have their own. */
  makeBuffers(shapes, threads) {
    const { hidden, heads, width, frequencies, localFrequencies } = this.config, rows = Math.max(PART, heads);
    const buffer = count => this.allocate(4 * count), padded = n => Math.ceil(n / 96) * 96 + 96;
    const scoreBytes = 4 * rows * padded(this.capacity), mixedBytes = 4 * rows * padded(width);
    const buffers = {
      x: buffer(PART * hidden), normalized: buffer(PART * hidden), qkv: buffer(PART * padded(shapes.qkv[1])),
      scores: this.allocate(threads * scoreBytes), scoreBytes, mixed: this.allocate(threads * mixedBytes), mixedBytes,
      attended: buffer(PART * shapes.out[0]), wide: buffer(PART * padded(shapes.up[1])), update: buffer(PART * padded(hidden)),
      logits: buffer(padded(shapes.head[1])),
    };
    const table = () => buffer((this.capacity * width) / 2), tables = () => ({ cos: table(), sin: table() });
    const turns = frequencies && tables(), localTurns = localFrequencies ? tables() : turns;
    this.turned = 0; // positions whose cosines and sines are known
    this.x = this.floats(buffers.x, PART * hidden);
    this.logits = this.floats(buffers.logits, this.config.vocabulary);
    return { buffers, turns, localTurns };
  }

  /** Starts the threads that there is room for. */
  async startThreads() {
    const { plan, memory, sync, room: threads } = this;
    await Promise.all(Array.from({ length: threads - 1 }, (_, i) => new Promise((resolve, reject) => {
      const helper = new Worker(new URL("./helper.js", import.meta.url), { type: "module" });
      this.helpers.push(helper);
      helper.onmessage = resolve;
      helper.onerror = event => reject(new Error(event.message ?? "a thread does not start"));
      helper.postMessage({ plan, memory, sync, index: i + 1, threads });
    })));
    this.threads = threads;
  }

  /** Ends all threads besides this one. */
  close() {
    this.helpers.forEach(helper => helper.terminate());
    this.helpers = [];
    this.threads = 1;
  }

  /** Runs tokens at the positions from `start` on; returns the logits after the last one, valid until the next call. */
  run(tokens, start) {
    checkTokens(tokens, start, this.config, this.capacity);
    for (let first = 0; first < tokens.length; first += PART)
      this.runPart(tokens.slice(first, first + PART), start + first, first + PART >= tokens.length);
    const { logits } = this, { vocabulary, finalCap } = this.config;
    if (finalCap) for (let i = 0; i < vocabulary; i++) logits[i] = Math.tanh(logits[i] / finalCap) * finalCap;
    return logits;
  }

  runPart(tokens, start, last) {
    const order = [start, tokens.length, Number(last)];
    this.turn(start + tokens.length);
    this.embed(tokens, start);
    if (this.threads > 1) this.team.order(order);
    else this.team.size = 1;
    this.runner.run(...order);
  }

  /** Computes the angles of rotary positions below `end`. */
  turn(end) {
    const { turned, plan, config } = this, half = config.width / 2;
    if (end <= turned) return;
    const { turns, localTurns } = plan, { frequencies, localFrequencies, angleFactor } = config;
    for (const [own, tables, factor] of [[frequencies, turns, angleFactor], [localFrequencies, localTurns, 1]]) {
      if (!own) continue;
      const { cos, sin } = angles(own, turned, end - turned, factor);
      this.floats(tables.cos + 4 * half * turned, cos.length).set(cos);
      this.floats(tables.sin + 4 * half * turned, sin.length).set(sin);
    }
    this.turned = end;
  }

  embed(tokens, start) {
    const { hidden, embeddingScale } = this.config, { x } = this;
    tokens.forEach((token, row) => {
      const to = row * hidden;
      if (this.table) x.set(this.table.subarray(token * hidden, (token + 1) * hidden), to);
      else this.head.column(token, x, to);
      if (embeddingScale !== 1) for (let i = 0; i < hidden; i++) x[to + i] *= embeddingScale;
      const position = (start + row) * hidden;
      if (this.positions) for (let i = 0; i < hidden; i++) x[to + i] += this.positions[position + i];
    });
  }
}
