// Loads the model, and generates text so that the page stays responsive.

import { Engine } from "./engine.js";
import { GpuEngine } from "./gpu_engine.js";
import { readTensors } from "./model.js";
import { makeTokenizer } from "./tokenizer.js";

const MOST_THREADS = 4;
let engine, tokenizer, settings, stopped = false;
const say = message => postMessage(message);

async function fetchBytes(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${address}: ${response.status} ${response.statusText}`);
  const total = Number(response.headers.get("Content-Length")), parts = [];
  let size = 0;
  for await (const part of chunks(response.body.getReader())) {
    parts.push(part);
    size += part.length;
    const of = total ? ` of ${(total / 1e6).toFixed(1)}` : "";
    say({ type: "status", text: `loading ${(size / 1e6).toFixed(1)}${of} MB` });
  }
  const all = new Uint8Array(size);
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all.buffer;
}

async function* chunks(reader) {
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

async function load() {
  const start = performance.now();
  const [config, vocabulary] = await Promise.all(
    ["model.json", "tokenizer_page.json"].map(address => fetch(address).then(response => response.json())));
  const tensors = readTensors(await fetchBytes("parameters.safetensors"));
  settings = config.generation;
  tokenizer = makeTokenizer(vocabulary);
  say({ type: "status", text: "measuring kernels" });
  const loaded = performance.now();
  const { chosen, others } = await chooseEngine(config, tensors);
  engine = chosen.engine;
  const now = performance.now(), { report, candidates } = engine, { device } = chosen;
  say({ type: "ready", report, candidates, device, others, tuneMs: now - loaded, totalMs: now - start, settings });
}

/** Returns the engine that the address asks for by ?device=webgpu or wasm, or else the faster of both. */
async function chooseEngine(config, tensors) {
  const query = new URLSearchParams(location.search), asked = query.get("device"), others = [];
  const budget = query.has("measure") ? Number(query.get("measure")) : undefined; // 0.1: starts sooner, slower kernels
  const found = [];
  if (asked !== "wasm") {
    try {
      const gpu = await GpuEngine.create(config, tensors, settings.context, budget, asked === "webgpu");
      found.push({ engine: gpu, device: `WebGPU: ${gpu.title}` });
    } catch (error) {
      if (asked === "webgpu") throw error;
      others.push(error.message);
    }
  }
  if (asked !== "webgpu") {
    const cpu = new Engine(config, tensors, settings.context, budget, mostThreads(query));
    const device = `WebAssembly, ${await chooseThreads(cpu, query.has("threads"), others)}`;
    found.push({ engine: cpu, device });
  }
  if (found.length > 1) for (const one of found) one.ms = await timeTokens(one.engine);
  found.sort((a, b) => a.ms - b.ms);
  for (const { engine: slower, device, ms } of found.slice(1)) {
    others.push(`${device} takes ${(ms / found[0].ms).toFixed(1)} times as long`);
    slower.close();
  }
  return { chosen: found[0], others };
}

/** Returns how many threads may share the model: one, if the server does not isolate the page. */
function mostThreads(query) {
  const asked = Number(query.get("threads") ?? Math.min(navigator.hardwareConcurrency, MOST_THREADS));
  return self.crossOriginIsolated ? Math.max(1, asked) : 1;
}

/** Starts threads, keeps them if they were asked for or are faster, and returns their number in words. */
async function chooseThreads(cpu, asked, others) {
  if (cpu.room > 1) {
    try {
      const alone = await timeTokens(cpu);
      await cpu.startThreads();
      const together = await timeTokens(cpu);
      if (!asked && alone < together) {
        cpu.close();
        others.push(`${cpu.room} threads take ${(together / alone).toFixed(1)} times as long`);
      }
    } catch (error) {
      cpu.close();
      others.push(error.message);
    }
  } else if (!self.crossOriginIsolated) {
    others.push("one thread: the server does not isolate the page (Cross-Origin-Opener-Policy, Cross-Origin-Embedder-Policy)");
  }
  return cpu.threads === 1 ? "1 thread" : `${cpu.threads} threads`;
}

/** Returns the milliseconds of a short prompt and the tokens after it, in the second of two tries. */
async function timeTokens(engine) {
  const count = Math.min(32, settings.context >> 1), tokens = Array(count).fill(0);
  let spent = 0;
  for (let trial = 0; trial < 2; trial++) {
    const start = performance.now();
    await engine.run(tokens, 0);
    for (let i = 0; i < count; i++) await engine.run([0], count + i);
    spent = performance.now() - start;
  }
  return spent;
}

/** Random numbers of a seed, uniform between 0 and 1 (mulberry32). */
function random(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** Returns the likeliest id, or with a temperature a sample: the largest logit with Gumbel noise. */
function choose(logits, temperature, next) {
  let best = 0, most = -Infinity;
  for (let id = 0; id < settings.vocabulary; id++) {
    const value = temperature > 0 ? logits[id] / temperature - Math.log(-Math.log(next() || 1e-12)) : logits[id];
    if (value > most) [best, most] = [id, value];
  }
  return best;
}

const { port1, port2 } = new MessageChannel();
/** Lets waiting messages, such as one that stops the text, be handled. */
const breathe = () => new Promise(resolve => {
  port1.onmessage = resolve;
  port2.postMessage(0);
});

async function generate({ id, prompt, ids, maxTokens, temperature, seed, documentStart }) {
  const opening = documentStart === false ? [] : [settings.document_start];
  let tokens = ids ?? [...opening, ...tokenizer.encode(prompt)];
  if (!tokens.length) throw new Error("give a text, or begin with the document start");
  const room = settings.context - tokens.length;
  if (room < 1) throw new Error(`the text has ${tokens.length} tokens; the model has room for ${settings.context - 1}`);
  const next = random(seed ?? 0), decoder = new TextDecoder(), made = [];
  stopped = false;
  const start = performance.now();
  let logits = await engine.run(tokens, 0), position = tokens.length, first = performance.now(), reason = "length";
  while (made.length < Math.min(maxTokens, room)) {
    const token = choose(logits, temperature, next);
    if (settings.stop_tokens.includes(token) && !ids) {
      reason = "stop";
      break;
    }
    made.push(token);
    say({ type: "token", id, text: decoder.decode(new Uint8Array(tokenizer.bytes(token)), { stream: true }) });
    if (made.length < Math.min(maxTokens, room)) logits = await engine.run([token], position++);
    await breathe();
    if (stopped) {
      reason = "stopped";
      break;
    }
  }
  const seconds = (performance.now() - first) / 1000, prefillMs = first - start;
  say({ type: "done", id, ids: made, prompt: tokens, reason, prefillMs, tokensPerSecond: (made.length - 1) / seconds });
}

const HANDLERS = {
  generate,
  logits: async ({ id, ids }) => say({ type: "logits", id, logits: Array.from(await engine.run(ids, 0)) }),
  encode: ({ id, text }) => say({ type: "ids", id, ids: tokenizer.encode(text) }),
};

let last = Promise.resolve(); // requests share the cache, so that one begins when the one before has ended
onmessage = ({ data }) => {
  if (data.type === "stop") return void (stopped = true);
  last = last.then(() => HANDLERS[data.type](data)).catch(error => say({ type: "error", id: data.id, text: error.message }));
};

load().catch(error => say({ type: "error", text: error.message }));
