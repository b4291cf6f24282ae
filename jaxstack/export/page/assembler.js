// Writes WebAssembly: functions from code to code as arrays of bytes, and modules with one function.

export const I32 = 0x7f, V128 = 0x7b;
const VOID = 0x40, BLOCK = 0x02, LOOP = 0x03, END = 0x0b, BR = 0x0c, BR_IF = 0x0d, IF = 0x04, GET = 0x20, SET = 0x21, CONST = 0x41;
const LT_S = 0x48;
export const SELECT = 0x1b, GT_S = 0x4a, ADD = 0x6a, MUL = 0x6c, SUB = 0x6b;
// Of vectors of four floats, or 128 bits.
export const LOAD = 0, SPLAT = 9, STORE = 11, STORE_LANE = 0x5a, AND = 0x4e, OR = 0x50;
export const F_ABS = 0xe0, F_SQRT = 0xe3, F_ADD = 0xe4, F_SUB = 0xe5, F_MUL = 0xe6, F_DIV = 0xe7, F_MIN = 0xe8, F_MAX = 0xe9;
export const NEAREST = 0x6a, TRUNCATE = 0xf8, I_ADD = 0xae, SHIFT = 0xab, MADD = 0x105;
export const I_SPLAT = 17, CONVERT = 0xfa; // an integer in all lanes, and integers to floats
const CONST_V = 12, SHUFFLE = 0x0d;

export function unsigned(value) {
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

export const get = local => [GET, ...unsigned(local)];
export const set = local => [SET, ...unsigned(local)];
export const number = value => [CONST, ...signed(value)];
export const simd = (code, ...rest) => [0xfd, ...unsigned(code), ...rest];
export const at = (code, offset) => simd(code, ...unsigned(2), ...unsigned(offset)); // aligned to 4 bytes
export const increase = (local, code) => [...get(local), ...code, ADD, ...set(local)];
/** The body, as long as the local `left` is at least `step`; `left` decreases by it. */
export const whilst = (left, step, body) => [
  BLOCK, VOID, LOOP, VOID, ...get(left), ...number(step), LT_S, BR_IF, 1, ...body, ...increase(left, number(-step)), BR, 0,
  END, END,
];
export const when = (condition, body) => [...condition, IF, VOID, ...body, END];

const bits = array => simd(CONST_V, ...new Uint8Array(array.buffer));
export const constant = value => bits(Float32Array.from([value, value, value, value]));
export const integers = (...values) => bits(Int32Array.from(values.length === 1 ? Array(4).fill(values[0]) : values));
export const zeros = integers(0);

/** Adds up (or, with another operation, combines) the lanes of a local; all lanes of the result are the same. */
export function across(operation, local) {
  const turn = lanes => [...get(local), ...get(local), ...get(local), ...simd(SHUFFLE, ...lanes.flatMap(i => [4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]))];
  return [[2, 3, 0, 1], [1, 0, 3, 2]].flatMap(lanes => [...turn(lanes), ...simd(operation), ...set(local)]);
}

/** Fills `bytes` bytes at an address with 0. */
export const clear = (address, bytes) => [...address, ...number(0), ...bytes, 0xfc, 0x0b, 0];

/**
 * Returns the bytes of a module with one function of `parameters` integers over the memory host.memory.
 *
 * @param locals pairs of a count and a type.
 * @param pages most pages of the memory if it is shared by threads, or else 0.
 */
export function assemble(parameters, locals, body, pages = 0) {
  const code = [...vector(locals.map(([count, type]) => [...unsigned(count), type])), ...body, END];
  const limits = pages ? [3, ...unsigned(1), ...unsigned(pages)] : [0, 1];
  return new Uint8Array([
    0, 0x61, 0x73, 0x6d, 1, 0, 0, 0,
    ...section(1, vector([[0x60, ...vector(Array(parameters).fill([I32])), 0]])),
    ...section(2, vector([[...name("host"), ...name("memory"), 2, ...limits]])),
    ...section(3, vector([[0]])),
    ...section(7, vector([[...name("call"), 0, 0]])),
    ...section(10, vector([[...unsigned(code.length), ...code]])),
  ]);
}

/** Compiles a module over a memory; returns its function. */
export function compile(bytes, memory) {
  return new WebAssembly.Instance(new WebAssembly.Module(bytes), { host: { memory } }).exports.call;
}
