// The Transformer's computation for a part of a text, in one thread or in several that share the memory.
//
// Every product of matrices, those of attention included, is a call of a tuned kernel (kernels.js); what is between them
// is in rows.js. All threads of a team run the same program: of a product each computes some panels of columns, of
// attention some heads, and of everything else some rows. They wait for each other where one reads what another wrote.

import { compile } from "./assembler.js";
import { emit } from "./kernels.js";
import { compileRows } from "./rows.js";

const SPINS = 20000; // tries before a thread sleeps
const ARRIVED = 0, ORDERED = 16, ORDER = 32; // places in the shared integers, in cache lines of their own

/** One of the threads that run a model together. */
export class Team {
  /** @param sync Int32Array that all threads share; `index` 0 gives the orders, the other `size` - 1 follow them. */
  constructor(sync, index, size) {
    Object.assign(this, { sync, index, all: size, size: 1, orders: 0, goal: 0 });
  }

  /** Returns once all threads of the team have called this. */
  meet() {
    if (this.size === 1) return;
    const { sync } = this, goal = (this.goal = (this.goal + this.size) | 0);
    Atomics.add(sync, ARRIVED, 1);
    for (let spins = 0, seen; ((seen = Atomics.load(sync, ARRIVED)) - goal | 0) < 0; spins++)
      if (spins > SPINS) Atomics.wait(sync, ARRIVED, seen, 0.1);
  }

  /** Gives an order, three integers, to all threads. */
  order(values) {
    const { sync } = this;
    this.size = this.all;
    this.goal = Atomics.load(sync, ARRIVED);
    sync.set([this.goal, ...values], ORDER);
    Atomics.add(sync, ORDERED, 1);
    Atomics.notify(sync, ORDERED);
  }

  /** Waits for the next order, and returns it. */
  wait() {
    const { sync, orders } = this;
    for (let spins = 0; Atomics.load(sync, ORDERED) === orders; spins++)
      if (spins > SPINS) Atomics.wait(sync, ORDERED, orders);
    this.orders = (orders + 1) | 0;
    const [goal, ...values] = sync.subarray(ORDER, ORDER + 4);
    [this.goal, this.size] = [goal, this.all];
    return values;
  }

  /** Returns [first, end] of this thread's share of `count` things. */
  share(count) {
    return [Math.floor((count * this.index) / this.size), Math.floor((count * (this.index + 1)) / this.size)];
  }
}

/** A model that lies packed in a memory, as `plan` of an engine says. */
export class Runner {
  constructor(plan, memory, team) {
    Object.assign(this, plan, { memory, team });
    this.rows = compileRows(plan.config, memory, plan.pages);
    this.floats = new Float32Array(memory.buffer);
    this.kernels = new Map();
    const here = part => ({ ...part, one: this.kernel(part.one), many: this.kernel(part.many) });
    const side = ({ packed, bias }) => ({ packed: here(packed), bias });
    this.layers = plan.layers.map(layer => ({
      ...layer, qkv: side(layer.qkv), out: side(layer.out), up: side(layer.up), down: side(layer.down),
      keys: here(layer.keys), values: here(layer.values),
    }));
    this.head = here(plan.head);
  }

  /** Returns the kernel of a shape. */
  kernel(shape) {
    const { mr, nv, group, unroll, stride } = shape, key = [mr, nv, group, unroll, stride ?? 0].join();
    if (!this.kernels.has(key)) this.kernels.set(key, compile(emit(shape, this.pages), this.memory));
    return this.kernels.get(key);
  }

  /** Multiplies m rows at the address x by this thread's panels of a matrix. */
  multiply({ one, many, address, panelBytes, panels, stride, width, k }, x, xStride, out, m) {
    const [first, end] = this.team.share(panels);
    if (first === end) return;
    const kernel = m === 1 ? one : many;
    kernel(
      x, xStride, address + first * panelBytes, panelBytes, out + 4 * width * first, stride, m, k, end - first);
  }

  normalize({ scale, bias }, from, to, size, stride, count) {
    const norm = bias ? this.rows.layerNorm : this.rows.rmsNorm;
    norm(from, stride, to, stride, size, count, scale, bias);
  }

  /** Runs the tokens whose embeddings are in `x`, at the positions from `start` on; with `head` up to the logits. */
  run(start, count, head) {
    const { team, buffers, config } = this, { hidden } = config, rows = team.share(count);
    this.normalizeRows(this.layers[0].attentionNorm, rows);
    for (const [i, layer] of this.layers.entries()) {
      team.meet();
      this.multiply(layer.qkv.packed, buffers.normalized, 4 * hidden, buffers.qkv, count);
      team.meet();
      this.prepare(layer, start, rows);
      team.meet();
      this.attention(layer, start, count);
      team.meet();
      this.multiply(layer.out.packed, buffers.attended, 4 * config.heads * config.width, buffers.update, count);
      team.meet();
      this.update(layer.out, layer.attentionPostNorm, layer.mlpNorm, rows);
      team.meet();
      this.multiply(layer.up.packed, buffers.normalized, 4 * hidden, buffers.wide, count);
      team.meet();
      this.activate(layer.up, rows);
      team.meet();
      this.multiply(layer.down.packed, buffers.wide, layer.up.packed.stride, buffers.update, count);
      team.meet();
      this.update(layer.down, layer.mlpPostNorm, this.layers[i + 1]?.attentionNorm, rows);
    }
    team.meet();
    if (head) this.runHead(count);
  }

  /** Computes the logits of the last of `count` rows. */
  runHead(count) {
    const { buffers, team } = this, { hidden } = this.config;
    if (team.index === 0)
      this.normalize(this.finalNorm, buffers.x + 4 * hidden * (count - 1), buffers.normalized, hidden, 4 * hidden, 1);
    team.meet();
    this.multiply(this.head, buffers.normalized, 4 * hidden, buffers.logits, 1);
    team.meet();
  }

  normalizeRows(norm, [first, end]) {
    const { hidden } = this.config, from = 4 * hidden * first;
    this.normalize(norm, this.buffers.x + from, this.buffers.normalized + from, hidden, 4 * hidden, end - first);
  }

  addBias({ bias, packed }, data, count) {
    if (bias) this.rows.add(data, packed.stride, bias, 0, packed.n, count);
  }

  /** Adds products to `x`, and normalizes it for the next ones. */
  update(side, postNorm, next, [first, end]) {
    const { buffers, config } = this, { hidden } = config, { stride } = side.packed, count = end - first;
    const from = buffers.update + first * stride;
    this.addBias(side, from, count);
    if (postNorm) this.normalize(postNorm, from, from, hidden, stride, count);
    this.rows.add(buffers.x + 4 * hidden * first, 4 * hidden, from, stride, hidden, count);
    if (next) this.normalizeRows(next, [first, end]);
  }

  /** Normalizes and rotates queries and keys, and stores keys and values. */
  prepare(layer, start, [first, end]) {
    const { heads, kvHeads, width } = this.config, { stride } = layer.qkv.packed, count = end - first;
    const data = this.buffers.qkv + first * stride;
    this.addBias(layer.qkv, data, count);
    if (layer.queryNorm)
      for (let row = 0, at = data; row < count; row++, at += stride) {
        this.normalize(layer.queryNorm, at, at, width, 4 * width, heads);
        this.normalize(layer.keyNorm, at + 4 * heads * width, at + 4 * heads * width, width, 4 * width, kvHeads);
      }
    const turns = layer.window ? this.localTurns : this.turns;
    if (turns) {
      const from = 2 * width * (start + first);
      this.rows.rotate(data, stride, turns.cos + from, turns.sin + from, 2 * width, heads + kvHeads, count);
    }
    for (let row = 0; row < count; row++)
      this.store(layer, (data + row * stride) / 4 + heads * width, start + first + row);
  }

  /** Writes the keys and values of one position, which lie from the float `at` on, into the panels. */
  store({ keys, values }, at, position) {
    const { floats, capacity } = this, { kvHeads, width } = this.config, keyWidth = 4 * keys.nv, valueWidth = 4 * values.nv;
    for (let head = 0; head < kvHeads; head++, at += width) {
      let to = (keys.address + head * keys.bytes) / 4 + (position % keyWidth) + Math.floor(position / keyWidth) * width * keyWidth;
      for (let i = 0; i < width; i++, to += keyWidth) floats[to] = floats[at + i];
      to = (values.address + head * values.bytes) / 4 + position * valueWidth;
      for (let from = at + kvHeads * width, left = width; left > 0; left -= valueWidth, to += capacity * valueWidth)
        for (let i = 0, size = Math.min(left, valueWidth); i < size; i++) floats[to + i] = floats[from++];
    }
  }

  attention(layer, start, count) {
    const { config, buffers, team } = this, { heads, kvHeads, width } = config, group = heads / kvHeads;
    const { stride } = layer.qkv.packed, { values } = layer, direct = values.panels * 4 * values.nv === width;
    // One token's query heads that share a key head are the rows of one product.
    const [parts, rows, xStride] = count === 1 ? [kvHeads, group, 4 * width] : [heads, count, stride];
    const outStride = count === 1 ? 4 * width : 4 * heads * width;
    const [first, end] = team.share(parts);
    for (let part = first; part < end; part++) {
      const head = count === 1 ? part * group : part, out = buffers.attended + 4 * head * width;
      const keyHead = Math.floor(head / group), queries = buffers.qkv + 4 * head * width;
      if (direct) this.attend(layer, queries, xStride, out, outStride, rows, keyHead, start, count);
      else this.attendAndCopy(layer, queries, xStride, out, outStride, rows, keyHead, start, count);
    }
  }

  /** Attends where the values' panels are wider than a head. */
  attendAndCopy(layer, queries, xStride, out, outStride, rows, head, start, count) {
    const { floats, buffers, team } = this, { width } = this.config, { values } = layer, stride = 16 * values.nv * values.panels;
    const mixed = buffers.mixed + team.index * buffers.mixedBytes;
    this.attend(layer, queries, xStride, mixed, stride, rows, head, start, count);
    for (let row = 0; row < rows; row++)
      for (let i = 0, to = (out + row * outStride) / 4, from = (mixed + row * stride) / 4; i < width; i++)
        floats[to + i] = floats[from + i];
  }

  /** Attends with `rows` queries of one key head. Rows are positions, or heads of one position. */
  attend({ keys, values, window }, queries, xStride, out, outStride, rows, head, start, count) {
    const { capacity, buffers, team } = this, { width } = this.config, seen = start + count, keyWidth = 4 * keys.nv;
    const panels = Math.ceil(seen / keyWidth), stride = 4 * panels * keyWidth, kernel = rows === 1 ? "one" : "many";
    const scores = buffers.scores + team.index * buffers.scoreBytes, keyPanel = 4 * width * keyWidth;
    keys[kernel](
      queries, xStride, keys.address + head * keys.bytes, keyPanel, scores, stride, rows, width, panels);
    this.rows.softmax(scores, stride, rows, start, count === 1 ? 0 : 1, window || capacity, seen);
    values[kernel](
      scores, stride, values.address + head * values.bytes, 16 * values.nv * capacity, out, outStride, rows, seen, values.panels);
  }

  activate(side, [first, end]) {
    const { stride } = side.packed, data = this.buffers.wide + first * stride, count = end - first;
    this.addBias(side, data, count);
    this.rows.activate(data, stride, this.config.feedForward, count);
  }
}
