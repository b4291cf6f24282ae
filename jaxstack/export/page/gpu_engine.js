// The Transformer on WebGPU, with the same calls as the engine in WebAssembly; results come as promises.

import { activate, attend, embed, norm, place, productCandidates, TILE } from "./gpu_kernels.js";
import { angles, checkTokens, PART } from "./model.js";

const ATTENTION_THREADS = 64;
const FINALISTS = 3;
const padded = count => Math.ceil(count / TILE) * TILE;

/** Returns the device of this browser, or throws an error that says why there is none; software only if it is asked for. */
async function openDevice(software, bytes) {
  if (!navigator.gpu) throw new Error("this browser has no WebGPU");
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw new Error("WebGPU found no GPU");
  if ((adapter.info?.isFallbackAdapter ?? adapter.isFallbackAdapter) && !software) throw new Error("WebGPU runs in software here");
  const { maxStorageBufferBindingSize, maxBufferSize } = adapter.limits;
  const most = Math.min(maxStorageBufferBindingSize, maxBufferSize);
  if (bytes > most) throw new Error(`the GPU holds arrays of ${most} bytes; the model has one of ${bytes}`);
  const device = await adapter.requestDevice({ requiredLimits: { maxStorageBufferBindingSize, maxBufferSize } });
  return { device, title: adapter.info?.description || adapter.info?.vendor || "GPU" };
}

/** A model on a GPU, with its cache. */
export class GpuEngine {
  /**
   * Returns an engine; throws an error that says why there can be none.
   *
   * @param config model.json.
   * @param tensors of `readTensors`.
   * @param capacity tokens that the cache has room for.
   * @param budget least time of one measurement in milliseconds; with 0 there is one candidate only.
   * @param software whether a GPU that is simulated by the processor will do.
   */
  static async create(config, tensors, capacity, budget = 2, software = false) {
    const sizes = Object.values(tensors).map(({ data }) => data.byteLength);
    const largest = Math.max(...sizes, 4 * config.hidden * padded(config.vocabulary));
    const { device, title } = await openDevice(software, largest);
    const engine = new GpuEngine(device, title, config, capacity, budget);
    engine.makeBuffers();
    engine.upload(tensors);
    await engine.compileProducts();
    await engine.compileOthers();
    await engine.tune();
    engine.check();
    return engine;
  }

  constructor(device, title, config, capacity, budget) {
    Object.assign(this, { device, title, config, capacity, budget, report: [], candidates: 0 });
    device.addEventListener("uncapturederror", ({ error }) => (this.failure ??= error.message));
    device.lost.then(({ message }) => (this.failure ??= message || "the GPU was lost"));
  }

  /** Throws the error that the GPU reported, if any. */
  check() {
    if (this.failure) throw new Error(`WebGPU: ${this.failure}`);
  }

  /** Returns a buffer that holds an array, or has room for a count of numbers. */
  buffer(numbers, usage = GPUBufferUsage.STORAGE) {
    const count = numbers.length ?? numbers, size = Math.max(16, Math.ceil(count / 4) * 16);
    const buffer = this.device.createBuffer({ size, usage: usage | GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC });
    if (numbers.length) this.device.queue.writeBuffer(buffer, 0, numbers);
    return buffer;
  }

  uniform(...numbers) {
    return this.buffer(Uint32Array.from(numbers), GPUBufferUsage.UNIFORM);
  }

  makeBuffers() {
    const { hidden, heads, kvHeads, width, feedForward, gated, vocabulary, frequencies } = this.config;
    this.sizes = {
      x: padded(hidden), qkv: padded((heads + 2 * kvHeads) * width), mixed: heads * width,
      wide: padded((gated ? 2 : 1) * feedForward), gates: feedForward, logits: padded(vocabulary),
    };
    const rows = count => this.buffer(PART * count), { x, qkv, mixed, wide, gates, logits } = this.sizes;
    Object.assign(this, {
      x: rows(x), normalized: rows(x), update: rows(x), qkv: rows(qkv), queries: rows(mixed), attended: rows(mixed),
      wide: rows(wide), gates: rows(gates), logits: this.buffer(logits), tokens: this.buffer(PART),
      turns: rows(2 * (frequencies?.length ?? 2)), localTurns: rows(2 * (frequencies?.length ?? 2)),
      part: this.uniform(0, 0, 0, 0), last: this.uniform(0, 0, 0, 0),
      noBias: this.buffer(new Float32Array(Math.max(x, qkv, wide, logits))),
      copy: this.device.createBuffer({ size: 4 * logits, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST }),
    });
  }

  /**
   * Copies a matrix [k, columns] to the GPU, padded to whole tiles of columns.
   *
   * @param parts matrices that lie side by side in it, { array, count, transposed } with `count` columns each.
   * @param stride numbers from one row of the left operand to the next; `add`: add products to the result.
   */
  matrix(k, parts, biases, stride, add) {
    const n = padded(parts.reduce((sum, { count }) => sum + count, 0)), data = new Float32Array(k * n);
    let first = 0;
    for (const { array, count, transposed } of parts) {
      for (let row = 0; row < k; row++)
        if (transposed) for (let i = 0; i < count; i++) data[row * n + first + i] = array[i * k + row];
        else data.set(array.subarray(row * count, (row + 1) * count), row * n + first);
      first += count;
    }
    const bias = new Float32Array(n);
    biases.reduce((at, one) => (bias.set(one, at), at + one.length), 0);
    const shape = this.uniform(k, n / 4, stride, add ? 1 : 0);
    return { k, n, vectors: n / 4, w: this.buffer(data), bias: biases.length ? this.buffer(bias) : this.noBias, shape };
  }

  /** Returns the scales and then the biases of a norm, or null if the model has no such norm. */
  normNumbers(tensors, path, size) {
    const scale = tensors[`${path}/scale`]?.data, bias = tensors[`${path}/bias`]?.data;
    if (!scale) return null;
    const both = new Float32Array(2 * size);
    both.set(bias ? scale : scale.map(value => value + this.config.normOffset));
    if (bias) both.set(bias, size);
    return both;
  }

  /** Copies the weights and reserves the cache. */
  upload(tensors) {
    const { config, sizes } = this, { hidden, vocabulary, tied } = config, find = name => tensors[name]?.data;
    this.centred = Boolean(find("final_norm/bias"));
    this.headCentred = Boolean(find("decoder/layers/0/attention/q_norm/bias"));
    this.layers = Array.from({ length: config.layers }, (_, i) => this.uploadLayer(tensors, i));
    this.finalNorm = this.buffer(this.normNumbers(tensors, "final_norm", hidden));
    const table = find("embedding/table"), places = find("position_embedding/table");
    const part = { array: tied ? table : find("head"), count: vocabulary, transposed: tied };
    this.head = this.matrix(hidden, [part], [], sizes.x, false);
    this.words = tied ? this.head.w : this.buffer(table);
    this.places = places ? this.buffer(places) : this.noBias;
  }

  uploadLayer(tensors, number) {
    const { config, sizes } = this, { hidden, heads, kvHeads, width, feedForward, gated } = config;
    const path = `decoder/layers/${number}`;
    const normOf = name => {
      const numbers = this.normNumbers(tensors, `${path}/${name}`, hidden);
      return numbers && this.buffer(numbers);
    };
    const side = (block, names, k, stride, add) => {
      const find = (name, kind) => tensors[`${path}/${block}/${name}/${kind}`]?.data;
      const parts = names.map(name => find(name, "kernel")).map(array => ({ array, count: array.length / k }));
      const biases = names.map(name => find(name, "bias")).filter(Boolean);
      return this.matrix(k, parts, biases, stride, add);
    };
    const attentionPost = normOf("attention_post_norm"), mlpPost = normOf("mlp_post_norm");
    const [queryNorm, keyNorm] = ["q_norm", "k_norm"].map(
      name => this.normNumbers(tensors, `${path}/attention/${name}`, width));
    const cache = () => this.buffer(kvHeads * this.capacity * width);
    return {
      window: config.windows[number], attentionNorm: normOf("attention_norm"), mlpNorm: normOf("mlp_norm"),
      attentionPost, mlpPost, keys: cache(), values: cache(),
      headNorms: queryNorm && this.buffer(Float32Array.from([...queryNorm, ...keyNorm])),
      qkv: side("attention", ["q_proj", "k_proj", "v_proj"], hidden, sizes.x, false),
      out: side("attention", ["o_proj"], heads * width, sizes.mixed, !attentionPost),
      up: side("mlp", gated ? ["gate_proj", "up_proj"] : ["up_proj"], hidden, sizes.x, false),
      down: side("mlp", ["down_proj"], feedForward, sizes.gates, !mlpPost),
    };
  }

  layout(kinds) {
    const types = { read: "read-only-storage", write: "storage", uniform: "uniform" };
    const visibility = GPUShaderStage.COMPUTE;
    const entries = kinds.map((kind, binding) => ({ binding, visibility, buffer: { type: types[kind] } }));
    return this.device.createBindGroupLayout({ entries });
  }

  /** Returns the compiled program; `layout` is the layout of its bindings, if other programs share it. */
  async compile({ code, kinds }, layout = this.layout(kinds)) {
    const module = this.device.createShaderModule({ code });
    const pipelineLayout = this.device.createPipelineLayout({ bindGroupLayouts: [layout] });
    const pipeline = await this.device.createComputePipelineAsync({ layout: pipelineLayout, compute: { module } });
    return { pipeline, layout };
  }

  group(layout, buffers) {
    const entries = buffers.map((buffer, binding) => ({ binding, resource: { buffer } }));
    return this.device.createBindGroup({ layout, entries });
  }

  async compileProducts() {
    const { one, many } = productCandidates(this.budget > 0 ? Infinity : 1);
    this.productLayout = this.layout(one[0].kinds);
    const compiled = async item => ({ ...item, ...(await this.compile(item, this.productLayout)) });
    this.products = { one: await Promise.all(one.map(compiled)), many: await Promise.all(many.map(compiled)) };
    this.candidates = one.length + many.length;
    const bind = (matrix, x, result) => {
      matrix.group = this.group(this.productLayout, [x, matrix.w, matrix.bias, result, matrix.shape]);
    };
    for (const layer of this.layers) {
      bind(layer.qkv, this.normalized, this.qkv);
      bind(layer.out, this.attended, layer.attentionPost ? this.update : this.x);
      bind(layer.up, this.normalized, this.wide);
      bind(layer.down, this.gates, layer.mlpPost ? this.update : this.x);
    }
    bind(this.head, this.normalized, this.logits);
  }

  /** Compiles all programs but the products, each to a step: an argument of `dispatch`. */
  async compileOthers() {
    const { config, sizes, part, capacity } = this, { hidden, heads, kvHeads, width, feedForward } = config;
    const { normEps: eps } = config;
    const known = new Map();
    const step = async (code, buffers, grid) => {
      if (!known.has(code.code)) known.set(code.code, await this.compile(code));
      const { pipeline, layout } = known.get(code.code);
      return { pipeline, group: this.group(layout, buffers), grid };
    };
    const normStep = (weights, source, result, add, from = part) => step(
      norm({ size: hidden, from: sizes.x, to: sizes.x, centred: this.centred, eps, add }),
      [source, weights, result, from], rows => [rows, 1]);
    const scale = config.embeddingScale, columns = config.tied ? this.head.n : 0;
    this.embedStep = await step(
      embed({ hidden, stride: sizes.x, columns, scale, positions: this.places !== this.noBias }),
      [this.tokens, this.words, this.places, this.x, part], rows => [Math.ceil(hidden / 64), rows]);
    this.finalStep = await normStep(this.finalNorm, this.x, this.normalized, false, this.last);
    for (const layer of this.layers) {
      const { keys, values, window, headNorms } = layer;
      layer.attentionStep = await normStep(layer.attentionNorm, this.x, this.normalized, false);
      layer.mlpStep = await normStep(layer.mlpNorm, this.x, this.normalized, false);
      layer.attentionPostStep = layer.attentionPost && await normStep(layer.attentionPost, this.update, this.x, true);
      layer.mlpPostStep = layer.mlpPost && await normStep(layer.mlpPost, this.update, this.x, true);
      const turns = window && config.localFrequencies ? this.localTurns : this.turns;
      layer.placeStep = await step(
        place({ heads, kvHeads, width, stride: sizes.qkv, capacity, scale: config.scale, normed: Boolean(headNorms),
          centred: this.headCentred, eps, rotated: Boolean(config.frequencies) }),
        [this.qkv, headNorms ?? this.noBias, turns, this.queries, keys, values, part], rows => [heads + 2 * kvHeads, rows]);
      layer.attendStep = await step(
        attend({ heads, kvHeads, width, capacity, window, cap: config.softCap, threads: ATTENTION_THREADS }),
        [this.queries, keys, values, this.attended, part], rows => [heads, rows]);
    }
    this.activateStep = await step(
      activate({ activation: config.activation, size: feedForward, stride: sizes.wide, gated: config.gated }),
      [this.wide, this.gates], rows => [Math.ceil(feedForward / 64), rows]);
  }

  /** Chooses a program for each shape of matrices, for single rows and for parts of prompts. */
  async tune() {
    const first = this.layers[0], chosen = new Map();
    const queue = [first.qkv, first.out, first.up, first.down, this.head];
    for (const matrix of queue) {
      const key = `${matrix.k}x${matrix.n}`;
      if (chosen.has(key)) continue;
      const one = await this.fastest(this.products.one, matrix, 1);
      const many = matrix === this.head ? null : await this.fastest(this.products.many, matrix, PART);
      chosen.set(key, { one, many });
    }
    const all = this.layers.flatMap(({ qkv, out, up, down }) => [qkv, out, up, down]);
    for (const matrix of [...all, this.head]) Object.assign(matrix, chosen.get(`${matrix.k}x${matrix.n}`));
  }

  async fastest(programs, matrix, rows) {
    const speed = async (program, budget) => {
      const ms = await this.time(program, matrix, rows, budget * this.budget);
      return { program, gflops: (2e-6 * rows * matrix.k * matrix.n) / ms };
    };
    const first = [];
    for (const program of programs) first.push(await speed(program, 1));
    const untuned = first[0].gflops;
    first.sort((a, b) => b.gflops - a.gflops);
    let best = null;
    for (const { program } of first.slice(0, FINALISTS)) {
      const found = await speed(program, 3);
      if (!best || found.gflops > best.gflops) best = found;
    }
    const { k, n } = matrix, { program, gflops } = best;
    this.report.push({ rows, k, n, tile: program.title, gflops, untuned });
    return program;
  }

  /** Returns the milliseconds of one product, over at least `budget` milliseconds. */
  async time(program, matrix, rows, budget) {
    for (let repeats = 1; ; repeats *= 2) {
      const start = performance.now();
      this.submit(pass => {
        for (let i = 0; i < repeats; i++) this.multiply(pass, matrix, rows, program);
      });
      await this.device.queue.onSubmittedWorkDone();
      const spent = performance.now() - start;
      if (spent >= budget) return spent / repeats;
    }
  }

  dispatch(pass, { pipeline, group, grid }, rows) {
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, group);
    pass.dispatchWorkgroups(...grid(rows));
  }

  /** Submits the commands that `write` records in a compute pass, followed by those that `after` records. */
  submit(write, after = () => {}) {
    const commands = this.device.createCommandEncoder(), pass = commands.beginComputePass();
    write(pass);
    pass.end();
    after(commands);
    this.device.queue.submit([commands.finish()]);
  }

  multiply(pass, matrix, rows, { pipeline, grid } = rows === 1 ? matrix.one : matrix.many) {
    this.dispatch(pass, { pipeline, group: matrix.group, grid: () => grid(matrix.vectors, rows) }, rows);
  }

  /** Runs tokens at the positions from `start` on; returns the logits after the last one. */
  async run(tokens, start) {
    checkTokens(tokens, start, this.config, this.capacity);
    for (let first = 0; first < tokens.length; first += PART) {
      const own = tokens.slice(first, first + PART), isLast = first + PART >= tokens.length;
      this.send(own, start + first);
      this.submit(pass => this.runPart(pass, own.length, isLast),
        commands => isLast && commands.copyBufferToBuffer(this.logits, 0, this.copy, 0, 4 * this.sizes.logits));
    }
    await this.copy.mapAsync(GPUMapMode.READ);
    const { vocabulary, finalCap } = this.config;
    const logits = new Float32Array(this.copy.getMappedRange(0, 4 * this.sizes.logits)).slice(0, vocabulary);
    this.copy.unmap();
    this.check();
    if (finalCap) for (let i = 0; i < vocabulary; i++) logits[i] = Math.tanh(logits[i] / finalCap) * finalCap;
    return logits;
  }

  /** Copies a part's tokens, position and rotary angles to the GPU. */
  send(tokens, start) {
    const { queue } = this.device, { frequencies, localFrequencies, angleFactor } = this.config;
    const count = tokens.length;
    queue.writeBuffer(this.tokens, 0, Uint32Array.from(tokens));
    queue.writeBuffer(this.part, 0, Uint32Array.of(count, start, 0, 0));
    queue.writeBuffer(this.last, 0, Uint32Array.of(1, start, count - 1, 0));
    for (const [target, own, factor] of [[this.turns, frequencies, angleFactor], [this.localTurns, localFrequencies, 1]]) {
      if (!own) continue;
      const { cos, sin } = angles(own, start, count, factor), both = new Float32Array(2 * cos.length);
      cos.forEach((value, i) => (both[2 * i] = value));
      sin.forEach((value, i) => (both[2 * i + 1] = value));
      queue.writeBuffer(target, 0, both);
    }
  }

  runPart(pass, rows, isLast) {
    this.dispatch(pass, this.embedStep, rows);
    for (const layer of this.layers) {
      this.dispatch(pass, layer.attentionStep, rows);
      this.multiply(pass, layer.qkv, rows);
      this.dispatch(pass, layer.placeStep, rows);
      this.dispatch(pass, layer.attendStep, rows);
      this.multiply(pass, layer.out, rows);
      if (layer.attentionPostStep) this.dispatch(pass, layer.attentionPostStep, rows);
      this.dispatch(pass, layer.mlpStep, rows);
      this.multiply(pass, layer.up, rows);
      this.dispatch(pass, this.activateStep, rows);
      this.multiply(pass, layer.down, rows);
      if (layer.mlpPostStep) this.dispatch(pass, layer.mlpPostStep, rows);
    }
    if (!isLast) return;
    this.dispatch(pass, this.finalStep, 1);
    this.multiply(pass, this.head, 1);
  }

  /** Frees the memory of the GPU. */
  close() {
    this.device.destroy();
  }
}
