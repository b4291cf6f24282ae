// Matrix kernels, emitted here as WebAssembly for this machine to try.
//
// A kernel multiplies rows x [m, k] by a matrix that is packed in panels of 4 nv columns, each [k, 4 nv]. It keeps a
// tile of mr rows and one panel in registers, and unrolls the loop over k. If all calls have the same distance between
// rows of x, it becomes a constant of the code: one address then serves all rows. Which (mr, nv, unroll) is fastest depends
// on the processor and on the shape, so `tune.js` measures all candidates.

const I32 = 0x7f, V128 = 0x7b, VOID = 0x40;
const BLOCK = 0x02, LOOP = 0x03, END = 0x0b, BR = 0x0c, BR_IF = 0x0d;
const GET = 0x20, SET = 0x21, CONST = 0x41;
const LT_S = 0x48, ADD = 0x6a, MUL = 0x6c;
const LOAD = 0, SPLAT = 9, STORE = 11, ZERO = 12, F_ADD = 0xe4, F_MUL = 0xe6, MADD = 0x105;

function unsigned(value) {
  const bytes = [];
  do {
    const low = value & 0x7f;
    value >>>= 7;
    bytes.push(value ? low | 0x80 : low);
  } while (value);
  return bytes;
}

function signed(value) {
  const bytes = [];
  for (;;) {
    const low = value & 0x7f;
    value >>= 7;
    const last = (value === 0 && !(low & 0x40)) || (value === -1 && low & 0x40);
    bytes.push(last ? low : low | 0x80);
    if (last) return bytes;
  }
}

const vector = items => [...unsigned(items.length), ...items.flat()];
const section = (id, bytes) => [id, ...unsigned(bytes.length), ...bytes];
const name = text => vector([...text].map(c => c.charCodeAt(0)));
const get = local => [GET, ...unsigned(local)];
const set = local => [SET, ...unsigned(local)];
const number = value => [CONST, ...signed(value)];
const simd = (code, ...rest) => [0xfd, ...unsigned(code), ...rest];
const at = (code, offset) => simd(code, ...unsigned(2), ...unsigned(offset)); // aligned to 4 bytes
const increase = (local, code) => [...get(local), ...code, ADD, ...set(local)];
const repeat = body => [LOOP, VOID, ...body, END];

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
  for (let i = 0; i < rows * nv; i++) code.push(...simd(ZERO, ...Array(16).fill(0)), ...set(sums + i));
  code.push(...get(K), ...set(left));
  for (const steps of unroll > 1 ? [unroll, 1] : [1]) {
    const body = [...get(left), ...number(steps), LT_S, BR_IF, 1, ...products(shape, steps, locals)];
    body.push(...increase(left, number(-steps)), BR, 0);
    code.push(BLOCK, VOID, ...repeat(body), END);
  }
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
  const body = [...get(remaining), ...number(rows), LT_S, BR_IF, 1, ...tile(shape, unroll, locals)];
  body.push(...increase(row, [...get(X_STRIDE), ...number(rows), MUL]));
  body.push(...increase(target, [...get(OUT_STRIDE), ...number(rows), MUL]));
  body.push(...increase(remaining, number(-rows)), BR, 0);
  return [BLOCK, VOID, ...repeat(body), END];
}

/** Returns the bytes of a module with one function, `multiply`; with a `stride`, for rows of x that many bytes apart. */
export function emit({ mr, nv, unroll, relaxed, stride }) {
  const integers = 6 + mr, vectors = mr * nv + nv + 1;
  const [row, target, remaining, weights, left, panel, inputs] = Array.from({ length: 7 }, (_, i) => 9 + i);
  const sums = 9 + integers, column = sums + mr * nv, element = column + nv;
  const locals = { row, target, remaining, weights, left, inputs, sums, column, element };
  const body = [...get(X), ...set(row), ...get(OUT), ...set(target), ...get(ROWS), ...set(remaining)];
  for (const rows of mr > 1 ? [mr, 1] : [1]) body.push(...tiles({ rows, nv, relaxed, stride }, unroll, locals));
  body.push(...increase(W, get(PANEL_BYTES)), ...increase(OUT, number(16 * nv)));
  body.push(...increase(panel, number(1)), ...get(panel), ...get(PANELS), LT_S, BR_IF, 0);
  return assemble("multiply", 9, [[...unsigned(integers), I32], [...unsigned(vectors), V128]], repeat(body));
}

/** Returns the bytes of a module with one function of `parameters` integers over the memory host.memory. */
function assemble(title, parameters, locals, body) {
  const code = [...vector(locals), ...body, END];
  return new Uint8Array([
    0, 0x61, 0x73, 0x6d, 1, 0, 0, 0,
    ...section(1, vector([[0x60, ...vector(Array(parameters).fill([I32])), 0]])),
    ...section(2, vector([[...name("host"), ...name("memory"), 2, 0, 1]])),
    ...section(3, vector([[0]])),
    ...section(7, vector([[...name(title), 0, 0]])),
    ...section(10, vector([[...unsigned(code.length), ...code]])),
  ]);
}

const constant = value => simd(ZERO, ...new Uint8Array(Float32Array.from([value, value, value, value]).buffer));
const integers4 = value => simd(ZERO, ...new Uint8Array(Int32Array.from([value, value, value, value]).buffer));
const F_SUB = 0xe5, F_MIN = 0xe8, F_MAX = 0xe9, NEAREST = 0x6a, TRUNCATE = 0xf8, I_ADD = 0xae, SHIFT = 0xab;

/** Coefficients of exp on [-ln 2 / 2, ln 2 / 2] from the highest power down (Cephes), relative error below 2e-7. */
const EXP = [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1];

/** Returns the bytes of a module with one function, `exponentials(from, to, count)`: exp of floats, four at a time. */
export function emitExponentials() {
  const [from, to, end, x, power, sum] = Array(6).keys();
  const times = code => [...code, ...simd(F_MUL)], plus = code => [...code, ...simd(F_ADD)];
  const body = [
    ...get(from), ...at(LOAD, 0), ...constant(-87), ...simd(F_MAX), ...constant(88), ...simd(F_MIN), ...set(x),
    ...get(x), ...times(constant(Math.LOG2E)), ...simd(NEAREST), ...set(power),
    ...get(x), ...get(power), ...times(constant(0.693359375)), ...simd(F_SUB),
    ...get(power), ...times(constant(-2.12194440e-4)), ...simd(F_SUB), ...set(x),
    ...constant(EXP[0]), ...EXP.slice(1).flatMap(c => [...times(get(x)), ...plus(constant(c))]), ...set(sum),
    ...get(to), ...get(sum), ...times(get(x)), ...times(get(x)), ...plus(get(x)), ...plus(constant(1)),
    ...get(power), ...simd(TRUNCATE), ...integers4(127), ...simd(I_ADD), ...number(23), ...simd(SHIFT), ...simd(F_MUL),
    ...at(STORE, 0), ...increase(from, number(16)), ...increase(to, number(16)),
    ...get(to), ...get(end), LT_S, BR_IF, 0,
  ];
  const start = [...get(to), ...get(end), ...number(4), MUL, ADD, ...set(end)]; // the third parameter is the count
  return assemble("exponentials", 3, [[...unsigned(3), V128]], [...start, ...repeat(body)]);
}

/** True if this browser fuses multiplications and additions (relaxed SIMD). */
export const fuses = WebAssembly.validate(emit({ mr: 1, nv: 1, unroll: 1, relaxed: true }));

/** Shapes of register tiles to try: at most 12 sums fit the 16 vector registers of most processors. */
export function candidates() {
  const rows = { 1: [4, 8], 2: [2, 4, 5, 6], 3: [2, 3, 4], 4: [2, 3], 6: [2], 8: [] };
  return Object.entries(rows).flatMap(([nv, more]) =>
    [1, ...more].flatMap(mr => [1, 2, 4].map(unroll => ({ mr, nv: Number(nv), unroll, relaxed: fuses }))));
}

/** Compiles a module over a memory; returns its one function. */
export function compile(bytes, memory) {
  const instance = new WebAssembly.Instance(new WebAssembly.Module(bytes), { host: { memory } });
  return Object.values(instance.exports)[0];
}
