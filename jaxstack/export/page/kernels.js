// Matrix kernels, emitted here as WebAssembly for this machine to try.
//
// A kernel multiplies rows x [m, k] by a matrix that is packed in panels of 4 nv columns, each [k, 4 nv]. It keeps a
// tile of mr rows and one panel in registers, and unrolls the loop over k. If all calls have the same distance between
// rows of x, it becomes a constant of the code: one address then serves all rows. Which (mr, nv, unroll) is fastest depends
// on the processor and on the shape, so `tune.js` measures all candidates.

import {
  ADD, assemble, at, F_ADD, F_MUL, get, I32, increase, LOAD, MADD, MUL, number, set, simd, SPLAT, STORE, until, V128, whilst,
  zeros,
} from "./assembler.js";

// Parameters of a kernel: addresses and row strides in bytes, counts in elements.
const [X, X_STRIDE, W, PANEL_BYTES, OUT, OUT_STRIDE, ROWS, K, PANELS] = Array(9).keys();

/** Emits the inner loop: `steps` elements of k for a tile of `rows` rows, with the given locals. */
function products({ rows, nv, relaxed, stride }, steps, { inputs, weights, sums, column, element }) {
  const code = [];
  for (let step = 0; step < steps; step++) {
    for (let j = 0; j < nv; j++) code.push(...get(weights), ...at(LOAD, 16 * (step * nv + j)), ...set(column + j));
    for (let i = 0; i < rows; i++) {
      const [address, offset] = stride ? [inputs, i * stride] : [inputs + i, 0];
      code.push(...get(address), ...at(SPLAT, 4 * step + offset), ...set(element));
      for (let j = 0; j < nv; j++) {
        const sum = sums + i * nv + j;
        const multiplied = [...get(element), ...get(column + j)];
        if (relaxed) code.push(...multiplied, ...get(sum), ...simd(MADD), ...set(sum));
        else code.push(...get(sum), ...multiplied, ...simd(F_MUL), ...simd(F_ADD), ...set(sum));
      }
    }
  }
  code.push(...increase(weights, number(16 * nv * steps)));
  for (let i = 0; i < (stride ? 1 : rows); i++) code.push(...increase(inputs + i, number(4 * steps)));
  return code;
}

/** Emits one tile: the rows from the local `row` on times the panel at W, written from the local `target` on. */
function tile(shape, unroll, locals) {
  const { rows, nv, stride } = shape, { row, target, inputs, weights, sums, left } = locals;
  const code = [...get(W), ...set(weights), ...get(row), ...set(inputs)];
  for (let i = 1; i < (stride ? 1 : rows); i++) code.push(...get(inputs + i - 1), ...get(X_STRIDE), ADD, ...set(inputs + i));
  for (let i = 0; i < rows * nv; i++) code.push(...zeros, ...set(sums + i));
  code.push(...get(K), ...set(left));
  for (const steps of unroll > 1 ? [unroll, 1] : [1]) code.push(...whilst(left, steps, products(shape, steps, locals)));
  code.push(...get(target), ...set(inputs));
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < nv; j++) code.push(...get(inputs), ...get(sums + i * nv + j), ...at(STORE, 16 * j));
    code.push(...increase(inputs, get(OUT_STRIDE)));
  }
  return code;
}

/** Emits the loop over tiles of `shape.rows` rows, as long as so many rows are left. */
function tiles(shape, unroll, locals) {
  const { row, target, remaining } = locals, { rows } = shape;
  return whilst(remaining, rows, [
    ...tile(shape, unroll, locals),
    ...increase(row, [...get(X_STRIDE), ...number(rows), MUL]),
    ...increase(target, [...get(OUT_STRIDE), ...number(rows), MUL]),
  ]);
}

/** Returns the bytes of a module with one function, which multiplies; with a `stride`, for rows of x that many bytes apart. */
export function emit({ mr, nv, unroll, relaxed, stride }, pages = 0) {
  const integers = 6 + mr, vectors = mr * nv + nv + 1;
  const [row, target, remaining, weights, left, panel, inputs] = Array.from({ length: 7 }, (_, i) => 9 + i);
  const sums = 9 + integers, column = sums + mr * nv, element = column + nv;
  const locals = { row, target, remaining, weights, left, inputs, sums, column, element };
  const body = [...get(X), ...set(row), ...get(OUT), ...set(target), ...get(ROWS), ...set(remaining)];
  for (const rows of [mr, ...[4, 2, 1].filter(fewer => fewer < mr)]) body.push(...tiles({ rows, nv, relaxed, stride }, unroll, locals));
  body.push(...increase(W, get(PANEL_BYTES)), ...increase(OUT, number(16 * nv)));
  body.push(...increase(panel, number(1)));
  return assemble(9, [[integers, I32], [vectors, V128]], until(panel, PANELS, body), pages);
}

/** True if this browser fuses multiplications and additions (relaxed SIMD). */
export const fuses = WebAssembly.validate(emit({ mr: 1, nv: 1, unroll: 1, relaxed: true }));

/** Shapes of register tiles to try: at most 12 sums fit the 16 vector registers of most processors. */
export function candidates() {
  const rows = { 1: [4, 8], 2: [2, 4, 5, 6], 3: [2, 3, 4], 4: [2, 3], 6: [2], 8: [] };
  return Object.entries(rows).flatMap(([nv, more]) =>
    [1, ...more].flatMap(mr => [1, 2, 4].map(unroll => ({ mr, nv: Number(nv), unroll, relaxed: fuses }))));
}
