// Measures a model, and products of matrices, in the exported page's engine and in ONNX Runtime Web in turn: see web.py.

import { Engine } from "./page/engine.js";
import { readTensors } from "./page/model.js";
import { scratchBytes, title, Tuner } from "./page/tune.js";
import * as ort from "./onnxruntime/ort.wasm.min.mjs";

ort.env.wasm.wasmPaths = new URL("./onnxruntime/", location.href).href;

const SPAN = 16; // tokens that are timed together

const bytes = address => fetch(address).then(response => response.arrayBuffer());
const int64 = (values, dims) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);
const range = (from, to) => Array.from({ length: to - from }, (_, i) => from + i);
const open = async address =>
  ort.InferenceSession.create(new Uint8Array(await bytes(address)), { executionProviders: ["wasm"] });

/** The exported graph with the calls of the page's engine: the logits after the last token. */
class Graph {
  constructor(session, config) {
    Object.assign(this, { session, config });
  }

  async run(tokens, start) {
    const { layers, kvHeads, width, vocabulary } = this.config, count = tokens.length, total = start + count;
    if (start === 0) {
      const empty = () => new ort.Tensor("float32", new Float32Array(0), [1, kvHeads, 0, width]);
      const names = range(0, layers).flatMap(i => [`past_key_values.${i}.key`, `past_key_values.${i}.value`]);
      this.past = Object.fromEntries(names.map(name => [name, empty()]));
    }
    const found = await this.session.run({
      input_ids: int64(tokens, [1, count]), position_ids: int64(range(start, total), [1, count]),
      attention_mask: int64(Array(total).fill(1), [1, total]), ...this.past,
    });
    for (const name of Object.keys(this.past)) this.past[name] = found[name.replace("past_key_values", "present")];
    return found.logits.data.subarray(0, vocabulary);
  }
}

function greedy(logits) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  return best;
}

/** Returns the ms of a prompt (the best of several) and of a token after it (the best span of 16), and the ids. */
async function generate(engine, prompt, count, repeats) {
  let promptMs = Infinity, tokenMs = Infinity, logits, start;
  for (let i = 0; i < repeats; i++) {
    start = performance.now();
    logits = await engine.run(prompt, 0);
    promptMs = Math.min(promptMs, performance.now() - start);
  }
  const ids = [];
  for (let i = 0; i < count; i++) {
    if (i % SPAN === 0) start = performance.now();
    ids.push(greedy(logits));
    logits = await engine.run([ids[i]], prompt.length + i);
    if (i % SPAN === SPAN - 1) tokenMs = Math.min(tokenMs, (performance.now() - start) / SPAN);
  }
  return { promptMs, tokenMs, ids, logits: Array.from(logits) };
}

async function measureModel({ prompt, count, rounds, repeats, context, threads }) {
  const config = await fetch("page/model.json").then(response => response.json());
  const tensors = readTensors(await bytes("page/parameters.safetensors"));
  let start = performance.now();
  const page = new Engine(config, tensors, context, undefined, threads);
  await page.startThreads();
  const pageMs = performance.now() - start;
  start = performance.now();
  const graph = new Graph(await open("model.onnx"), config);
  const graphMs = performance.now() - start;
  await generate(page, prompt, SPAN, 1);
  await generate(graph, prompt, SPAN, 1);
  const found = { page: [], graph: [] };
  for (let round = 0; round < rounds; round++) {
    found.page.push(await generate(page, prompt, count, repeats));
    found.graph.push(await generate(graph, prompt, count, repeats));
  }
  return { ...found, pageMs, graphMs };
}

/** Returns the ms of one call, over at least 4 ms: short beside the time that other programs interrupt this one for. */
async function time(call) {
  for (let calls = 1; ; calls *= 2) {
    const start = performance.now();
    for (let i = 0; i < calls; i++) await call();
    const spent = performance.now() - start;
    if (spent > 4) return spent / calls;
  }
}

/** A product x [m, k] @ w [k, n] by the fastest of the page's kernels: `call` computes it, `result` reads it. */
function ownProduct(m, k, n, x, w) {
  const columns = Math.ceil(n / 96) * 96, scratch = scratchBytes([[k, n]]);
  const size = 4 * (m * k + k * columns + m * columns);
  const memory = new WebAssembly.Memory({ initial: Math.ceil((size + scratch) / 65536) + 1 });
  const tuner = new Tuner(memory, 64, scratch), alike = tuner.kernels.filter(kernel => m > 1 || kernel.mr === 1);
  const { kernel } = tuner.best(alike, m === 1 ? 1 : 64, k, n, m === 1 ? 0 : 4 * k);
  const width = 4 * kernel.nv, panels = Math.ceil(n / width), stride = 4 * panels * width;
  const from = 64 + scratch, to = from + 4 * m * k, out = to + 4 * k * columns;
  new Float32Array(memory.buffer, from, m * k).set(x);
  const packed = new Float32Array(memory.buffer, to, k * columns);
  for (let row = 0; row < k; row++)
    for (let i = 0; i < n; i++) packed[Math.floor(i / width) * k * width + row * width + (i % width)] = w[row * n + i];
  const call = () => kernel.multiply(from, 4 * k, to, 4 * k * width, out, stride, m, k, panels);
  const result = () => range(0, m).flatMap(row => Array.from(new Float32Array(memory.buffer, out + row * stride, n)));
  return { call, result, title: title(kernel) };
}

async function measureProduct({ file, m, k, n, rounds }) {
  const random = count => Float32Array.from({ length: count }, () => Math.random() - 0.5);
  const x = random(m * k), w = new Float32Array(await bytes(`${file}.weights`));
  const own = ownProduct(m, k, n, x, w), session = await open(`${file}.onnx`);
  const call = () => session.run({ x: new ort.Tensor("float32", x, [m, k]) });
  own.call();
  const ours = own.result(), theirs = (await call()).y.data;
  const difference = ours.reduce((most, value, i) => Math.max(most, Math.abs(value - theirs[i])), 0);
  const page = [], graph = [];
  for (let round = 0; round < rounds; round++) {
    for (let i = 0; i < 4; i++) {
      page.push(await time(own.call));
      graph.push(await time(call));
    }
  }
  return { page, graph, difference, title: own.title };
}

onmessage = async ({ data }) => {
  try {
    ort.env.wasm.numThreads = data.threads;
    postMessage({ found: await { model: measureModel, product: measureProduct }[data.kind](data) });
  } catch (error) {
    postMessage({ error: `${error.message}\n${error.stack}` });
  }
};
