// Matrix kernels, emitted here as WebAssembly for this machine to try.
//
// A kernel multiplies rows x [m, k] by a matrix that is packed in panels of 4 nv columns, each [k, 4 nv]. It keeps a
// tile of mr rows and `group` panels in registers, and unrolls the loop over k. If all calls have the same distance between
// rows of x, it becomes a constant of the code: one address then serves all rows. Which (mr, nv, group, unroll) is fastest
// depends on the processor and on the shape, so `tune.js` measures all candidates.

import {
  ADD, assemble, at, F_ADD, F_MUL, get, I32, increase, LOAD, MADD, MUL, number, set, simd, SPLAT, STORE, V128, whilst, zeros,
} from "./assembler.js";

// Parameters of a kernel: addresses and row strides in bytes, counts in elements.
const [X, X_STRIDE, W, PANEL_BYTES, OUT, OUT_STRIDE, ROWS, K, PANELS] = Array(9).keys();

/** Emits the inner loop: `steps` elements of k for a tile of `rows` rows, with the given locals. */
function products({ rows, nv, group, relaxed, stride }, steps, { inputs, weights, sums, column, element }) {
  const code = [], columns = nv * group;
  for (let step = 0; step < steps; step++) {
    const loadColumn = j => [...get(weights + Math.floor(j / nv)), ...at(LOAD, 16 * (step * nv + (j % nv)))];
    if (rows > 1) for (let j = 0; j < columns; j++) code.push(...loadColumn(j), ...set(column + j));
    for (let i = 0; i < rows; i++) {
      const [address, offset] = stride ? [inputs, i * stride] : [inputs + i, 0];
      code.push(...get(address), ...at(SPLAT, 4 * step + offset), ...set(element));
      for (let j = 0; j < columns; j++) {
        const sum = sums + i * columns + j;
        const multiplied = [...get(element), ...(rows > 1 ? get(column + j) : loadColumn(j))];
        if (relaxed) code.push(...multiplied, ...get(sum), ...simd(MADD), ...set(sum));
        else code.push(...get(sum), ...multiplied, ...simd(F_MUL), ...simd(F_ADD), ...set(sum));
      }
    }
  }
  for (let g = 0; g < group; g++) code.push(...increase(weights + g, number(16 * nv * steps)));
  for (let i = 0; i < (stride ? 1 : rows); i++) code.push(...increase(inputs + i, number(4 * steps)));
  return code;
}

/** Emits one tile: the rows from the local `row` on times the panels at W, written from the local `target` on. */
function tile(shape, unroll, locals) {
  const { rows, nv, group, stride } = shape, { row, target, inputs, weights, sums, left } = locals, columns = nv * group;
  const code = [...get(W), ...set(weights), ...get(row), ...set(inputs)];
  for (let g = 1; g < group; g++) code.push(...get(weights + g - 1), ...get(PANEL_BYTES), ADD, ...set(weights + g));
  for (let i = 1; i < (stride ? 1 : rows); i++) code.push(...get(inputs + i - 1), ...get(X_STRIDE), ADD, ...set(inputs + i));
  for (let i = 0; i < rows * columns; i++) code.push(...zeros, ...set(sums + i));
  code.push(...get(K), ...set(left));
  for (const steps of unroll > 1 ? [unroll, 1] : [1]) code.push(...whilst(left, steps, products(shape, steps, locals)));
  code.push(...get(target), ...set(inputs));
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++) code.push(...get(inputs), ...get(sums + i * columns + j), ...at(STORE, 16 * j));
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
export function emit({ mr, nv, group, unroll, relaxed, stride }, pages = 0) {
  const integers = 4 + group + mr, sizes = mr * nv * group;
  const [row, target, remaining, left, weights] = Array.from({ length: 5 }, (_, i) => 9 + i);
  const inputs = weights + group, sums = 9 + integers, column = sums + sizes, element = column + (mr > 1 ? nv * group : 0);
  const locals = { row, target, remaining, weights, left, inputs, sums, column, element };
  const panels = together => {
    const body = [...get(X), ...set(row), ...get(OUT), ...set(target), ...get(ROWS), ...set(remaining)];
    const fewer = [4, 2, 1].filter(rows => rows < mr);
    for (const rows of [mr, ...fewer]) body.push(...tiles({ rows, nv, group: together, relaxed, stride }, unroll, locals));
    body.push(...increase(W, [...get(PANEL_BYTES), ...number(together), MUL]), ...increase(OUT, number(16 * nv * together)));
    return whilst(PANELS, together, body);
  };
  const body = (group > 1 ? [group, 1] : [1]).flatMap(panels);
  return assemble(9, [[integers, I32], [element + 1 - sums, V128]], body, pages);
}

/** True if this browser fuses multiplications and additions (relaxed SIMD). */
export const fuses = WebAssembly.validate(emit({ mr: 1, nv: 1, group: 1, unroll: 1, relaxed: true }));

/** Shapes of register tiles to try: at most 12 sums fit the 16 vector registers of most processors. */
export function candidates() {
  const rows = { 1: [4, 8], 2: [4, 5, 6], 3: [2, 3, 4], 4: [2, 3], 6: [2] }, groups = { 1: [1, 8], 2: [1, 4], 3: [1, 2], 4: [1, 2], 6: [1, 2] };
  return Object.keys(rows).flatMap(width => {
    const tiles = [...groups[width].map(group => ({ mr: 1, group })), ...rows[width].map(mr => ({ mr, group: 1 }))];
    return tiles.flatMap(tile => [1, 2, 4].map(unroll => ({ ...tile, nv: Number(width), unroll, relaxed: fuses })));
  });
}
