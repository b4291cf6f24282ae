// Measures the candidates of kernels.js for each shape of a model, and chooses.

import { compile } from "./assembler.js";
import { candidates, emit } from "./kernels.js";

const ROWS = 64; // tokens of a prompt in one product
const STEPS = 64; // single tokens that are weighed against that prompt
const FINALISTS = 3;
const WARM_MS = 1; // after a few times as much work a browser compiles a function again, with optimization

/** Returns the time of one call in milliseconds, over about `budget` milliseconds. */
function time(call, budget) {
  let calls = 0, repeats = 1, spent = 0;
  const start = performance.now();
  do {
    for (let i = 0; i < repeats; i++) call();
    calls += repeats;
    repeats *= 2;
    spent = performance.now() - start;
  } while (spent < budget || spent === 0);
  return spent / calls;
}

/** Returns the words for a kernel. */
export const title = ({ mr, nv, group, unroll, stride }) =>
  `${mr} x ${4 * nv}${group > 1 ? ` x ${group} panels` : ""}, unroll ${unroll}${stride ? ", fixed stride" : ""}`;

/** Compiled candidates over a memory. */
export class Tuner {
  /**
   * @param memory WebAssembly.Memory of the model.
   * @param scratch address of an area that measurements may overwrite, and `scratchBytes` its size.
   * @param budget least time of one measurement in milliseconds; with 0 there are two candidates only.
   * @param pages of the memory if threads share it, or else 0.
   */
  constructor(memory, scratch, scratchBytes, budget = 1, pages = 0) {
    const start = performance.now();
    this.memory = memory;
    this.pages = pages;
    this.scratch = scratch;
    this.scratchBytes = scratchBytes;
    this.budget = budget;
    this.report = [];
    this.chosen = new Map();
    const tried = ({ mr, nv, group, unroll }) => budget > 0 || (nv === 2 && unroll === 1 && group === 1 && mr !== 5 && mr !== 6);
    this.kernels = this.compile(candidates().filter(tried));
    this.compileMs = performance.now() - start;
  }

  /** Compiles candidates, and calls them until the browser has optimized them: before that, times would mislead. */
  compile(shapes) {
    const kernels = shapes.map(shape => ({ ...shape, multiply: compile(emit(shape, this.pages), this.memory) }));
    const calls = kernels.map(kernel => this.call(kernel, 8, 64, 96)), best = calls.map(() => Infinity);
    for (let round = 0, faster = true; this.budget > 0 && round < 40 && (faster || round < 5); round++) {
      faster = false;
      calls.forEach((call, i) => {
        const ms = time(call, WARM_MS);
        faster ||= ms < 0.7 * best[i];
        best[i] = Math.min(best[i], ms);
      });
    }
    return kernels;
  }

  /**
   * Returns { nv, one, many } for matrices [k, n]: the panel width in vectors, and the kernels for single rows and for
   * prompts. Both read the same panels, so the width is the best for a prompt of 64 tokens and 64 new ones. With a
   * `stride`, `many` multiplies rows that are that many bytes apart, and no others.
   */
  choose(k, n, stride = 0) {
    const key = `${k}x${n}x${stride}`;
    if (!this.chosen.has(key)) this.chosen.set(key, this.measure(k, n, stride));
    return this.chosen.get(key);
  }

  measure(k, n, stride) {
    const ones = this.fastest(this.kernels.filter(kernel => kernel.mr === 1), 1, k, n);
    const manies = this.fastest(this.kernels, ROWS, k, n, stride);
    let chosen = null;
    for (const [nv, one] of ones) {
      const many = manies.get(nv), padded = Math.ceil(n / (4 * nv)) * 4 * nv; // the padding is computed too
      const cost = padded * (STEPS / one.gflops + ROWS / many.gflops);
      if (!chosen || cost < chosen.cost) chosen = { cost, nv, one, many };
    }
    const simplest = this.kernels[0]; // one row and four columns, not unrolled
    for (const [rows, found] of [[1, chosen.one], [ROWS, chosen.many]]) {
      const [{ gflops: untuned }] = this.speeds([simplest], rows, k, n, 4);
      this.report.push({ rows, k, n, tile: title(found.kernel), gflops: found.gflops, untuned });
    }
    const plain = ({ multiply, ...shape }) => shape; // which other threads compile too
    return { nv: chosen.nv, one: plain(chosen.one.kernel), many: plain(chosen.many.kernel) };
  }

  /**
   * Returns, by panel width, { kernel, gflops } of the fastest of `kernels` for m rows, also with the stride of rows as a
   * constant.
   */
  fastest(kernels, m, k, n, stride = 0) {
    const first = this.speeds(kernels, m, k, n, 3);
    const finalists = [...new Set(kernels.map(kernel => kernel.nv))].flatMap(nv =>
      first.filter(({ kernel }) => kernel.nv === nv).slice(0, FINALISTS).map(({ kernel }) => kernel));
    const tiles = stride ? finalists.filter(kernel => kernel.mr > 1) : [];
    const fixed = this.compile(tiles.map(kernel => ({ ...kernel, stride })));
    const again = this.speeds([...finalists, ...fixed], m, k, n, 8);
    return new Map(again.reverse().map(found => [found.kernel.nv, found])); // the fastest of a width is set last
  }

  /** Returns { kernel, gflops } of the fastest of `kernels`. */
  best(kernels, m, k, n, stride = 0) {
    return [...this.fastest(kernels, m, k, n, stride).values()].reduce((a, b) => (a.gflops > b.gflops ? a : b));
  }

  /** Measures kernels in turn, so that a disturbance falls on all; returns { kernel, gflops }, the fastest first. */
  speeds(kernels, m, k, n, rounds) {
    const columns = kernels.map(kernel => this.limit(k, n, kernel.stride)), best = kernels.map(() => Infinity);
    const calls = kernels.map((kernel, i) => this.call(kernel, m, k, columns[i]));
    for (let round = 0; round < rounds; round++)
      calls.forEach((call, i) => best[i] = Math.min(best[i], time(call, this.budget)));
    const found = kernels.map((kernel, i) => ({ kernel, gflops: (2e-6 * m * k * columns[i]) / best[i] }));
    return found.sort((a, b) => b.gflops - a.gflops);
  }

  /** Columns of a matrix with k rows that fit the scratch area, at most n. */
  limit(k, n, stride = 0) {
    const floats = this.scratchBytes / 4 - ROWS * (stride / 4 || k);
    const most = Math.floor(floats / (k + ROWS) / 96) * 96; // whole panels of every width
    return Math.max(96, Math.min(Math.ceil(n / 96) * 96, most));
  }

  /** Returns a function that multiplies m rows of the scratch area. */
  call({ nv, stride, multiply }, m, k, columns) {
    const x = this.scratch, w = x + ROWS * (stride || 4 * k), out = w + 4 * k * columns;
    const panels = columns / (4 * nv);
    return () => multiply(x, stride || 4 * k, w, 16 * nv * k, out, 4 * columns, m, k, panels);
  }
}

/** Bytes of scratch area that measuring a model with these shapes [k, n], or [k, n, stride], takes. */
export function scratchBytes(shapes) {
  const floats = shapes.map(([k, n, stride = 4 * k]) => (ROWS * stride) / 4 + (Math.min(n, 4096) + 96) * (k + ROWS));
  return 4 * Math.max(...floats);
}
