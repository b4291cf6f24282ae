// What is computed between the products of matrices: norms, rotations, softmax, activations and sums, for rows of floats.
//
// Each function is emitted as WebAssembly for one model: its sizes and constants are part of the code. Addresses and
// strides are in bytes, counts in elements.

import {
  across, ADD, AND, assemble, at, clear, compile, constant, CONVERT, F_ABS, F_ADD, F_DIV, F_MAX, F_MIN, F_MUL, F_SQRT, F_SUB, get, GT_S,
  I32, I_ADD, I_SPLAT, increase, integers, LOAD, MADD, MUL, NEAREST, number, OR, SELECT, set, SHIFT, simd, SPLAT, STORE, STORE_LANE, SUB,
  TRUNCATE, V128, when, whilst,
} from "./assembler.js";
import { fuses } from "./kernels.js";

const INTEGERS = 6, VECTORS = 6; // locals of every function

const add = (a, b) => [...a, ...b, ...simd(F_ADD)], subtract = (a, b) => [...a, ...b, ...simd(F_SUB)];
const times = (a, b) => [...a, ...b, ...simd(F_MUL)], divide = (a, b) => [...a, ...b, ...simd(F_DIV)];
/** a * b + c, with one rounding where the browser can. */
const timesAdd = (a, b, c) => (fuses ? [...a, ...b, ...c, ...simd(MADD)] : add(times(a, b), c));
/** A polynomial in x, by its coefficients from the highest power down. */
const polynomial = (x, [first, ...rest]) =>
  rest.reduce((sum, c) => timesAdd(sum, x, constant(c)), constant(first));

/**
 * Emits `body(load, store, own)` for four elements at a time, and then for each that is left.
 *
 * `load(pointer)` gives four elements, or one in all lanes; `store(pointer, value)` writes as many; `own(value)` is 0 in
 * the lanes that count no element of their own, for sums.
 */
function elements(count, left, pointers, body) {
  const advance = step => pointers.flatMap(pointer => increase(pointer, number(4 * step)));
  const four = body(p => [...get(p), ...at(LOAD, 0)], (p, value) => [...get(p), ...value, ...at(STORE, 0)], value => value);
  const one = body(
    p => [...get(p), ...at(SPLAT, 0)], (p, value) => [...get(p), ...value, ...at(STORE_LANE, 0), 0],
    value => [...value, ...integers(-1, 0, 0, 0), ...simd(AND)]);
  return [...count, ...set(left), ...whilst(left, 4, [...four, ...advance(4)]), ...whilst(left, 1, [...one, ...advance(1)])];
}

/** exp of a value, relative error below 2e-7 (Cephes): a polynomial on [-ln 2 / 2, ln 2 / 2] times a power of 2. */
function exponential(value, x, power) {
  const terms = [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1, 1];
  return [
    ...value, ...constant(-87), ...simd(F_MAX), ...constant(88), ...simd(F_MIN), ...set(x),
    ...times(get(x), constant(Math.LOG2E)), ...simd(NEAREST), ...set(power),
    ...timesAdd(get(power), constant(2.12194440e-4), timesAdd(get(power), constant(-0.693359375), get(x))), ...set(x),
    ...polynomial(get(x), terms),
    ...get(power), ...simd(TRUNCATE), ...integers(127), ...simd(I_ADD), ...number(23), ...simd(SHIFT), ...simd(F_MUL),
  ];
}

/** tanh of a value: 1 - 2 / (1 + exp(2 y)). */
const tanh = (value, x, power) => subtract(constant(1),
  divide(constant(2), add(constant(1), exponential(times(value, constant(2)), x, power))));

/** Activations of the local `x`; `a`, `b` and `c` are free. */
const ACTIVATIONS = {
  silu: (x, a, b) => divide(get(x), add(constant(1), exponential(times(get(x), constant(-1)), a, b))),
  gelu_tanh(x, a, b) { // x (1 + tanh(y)) / 2 = x - x / (1 + exp(2 y))
    const inner = timesAdd(times(get(x), get(x)), constant(0.044715), constant(1));
    const argument = times(times(get(x), constant(2 * Math.sqrt(2 / Math.PI))), inner);
    return subtract(get(x), divide(get(x), add(constant(1), exponential(argument, a, b))));
  },
  gelu(x, a, b, c) { // erf by Abramowitz and Stegun 7.1.26, error 2e-7
    const size = [...get(x), ...simd(F_ABS)];
    const t = divide(constant(1), timesAdd(size, constant(0.3275911 * Math.SQRT1_2), constant(1)));
    const series = polynomial(get(c), [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0]);
    const e = exponential(times(times(get(x), get(x)), constant(-0.5)), a, b);
    const erf = [...subtract(constant(1), times(series, e)), ...get(x), ...integers(1 << 31), ...simd(AND), ...simd(OR)];
    return [...t, ...set(c), ...times(times(get(x), constant(0.5)), add(constant(1), erf))];
  },
  relu: x => [...get(x), ...constant(0), ...simd(F_MAX)],
  relu_squared(x) {
    const value = ACTIVATIONS.relu(x);
    return times(value, value);
  },
};

/** Returns the bytes of a function whose body `emitRow(integers, vectors)` runs for each of `rows` rows. */
function overRows(parameters, rows, strides, emitRow, pages) {
  const own = Array.from({ length: INTEGERS }, (_, i) => parameters + i);
  const vectors = Array.from({ length: VECTORS }, (_, i) => parameters + INTEGERS + i);
  const advance = strides.flatMap(([address, stride]) => increase(address, get(stride)));
  const body = whilst(rows, 1, [...emitRow(own, vectors), ...advance]);
  return assemble(parameters, [[INTEGERS, I32], [VECTORS, V128]], body, pages);
}

/** add(to, toStride, from, fromStride, size, rows): to += from. */
function emitAdd(pages) {
  const [to, toStride, from, fromStride, size, rows] = Array(6).keys();
  return overRows(6, rows, [[to, toStride], [from, fromStride]], ([left, p, q]) => [
    ...get(to), ...set(p), ...get(from), ...set(q),
    ...elements(get(size), left, [p, q], (load, store) => store(p, add(load(p), load(q)))),
  ], pages);
}

/**
 * normalize(from, fromStride, to, toStride, size, rows, scale, bias): RMS norm, or with `centered` layer norm, of rows
 * (Zhang and Sennrich 2019; Ba et al. 2016). Only layer norm has a bias.
 */
function emitNormalize(centered, eps, pages) {
  const [from, fromStride, to, toStride, size, rows, scale, bias] = Array(8).keys();
  return overRows(8, rows, [[from, fromStride], [to, toStride]], ([left, p, q, s, b, n], [mean, sum, x, count]) => {
    const begin = [...get(from), ...set(p), ...constant(0), ...set(sum)], code = [...get(size), ...set(n)];
    const value = load => (centered ? subtract(load(p), get(mean)) : load(p));
    // The number of elements as floats.
    code.push(...get(n), ...simd(I_SPLAT), ...simd(CONVERT), ...set(count));
    if (centered) {
      code.push(...begin, ...elements(get(n), left, [p], (load, _, own) => [...add(get(sum), own(load(p))), ...set(sum)]));
      code.push(...across(F_ADD, sum), ...divide(get(sum), get(count)), ...set(mean));
    }
    code.push(...begin, ...elements(get(n), left, [p], (load, _, own) =>
      [...own(value(load)), ...set(x), ...timesAdd(get(x), get(x), get(sum)), ...set(sum)]));
    const variance = add(divide(get(sum), get(count)), constant(eps));
    code.push(...across(F_ADD, sum), ...divide(constant(1), [...variance, ...simd(F_SQRT)]), ...set(sum));
    code.push(...get(from), ...set(p), ...get(to), ...set(q), ...get(scale), ...set(s), ...get(bias), ...set(b));
    code.push(...elements(get(n), left, [p, q, s, b], (load, store) => {
      const scaled = times(times(value(load), get(sum)), load(s));
      return store(q, centered ? add(scaled, load(b)) : scaled);
    }));
    return code;
  }, pages);
}

/** rotate(data, stride, cos, sin, angleStride, heads, rows): rotary positions of heads [2 half] that lie side by side. */
function emitRotate(half, pages) {
  const [data, stride, cos, sin, angleStride, heads, rows] = Array(7).keys();
  return overRows(7, rows, [[data, stride], [cos, angleStride], [sin, angleStride]], ([left, p, q, c, s, head], [x, y]) => [
    ...get(data), ...set(p), ...get(heads), ...set(head),
    ...whilst(head, 1, [
      ...get(p), ...number(4 * half), ADD, ...set(q), ...get(cos), ...set(c), ...get(sin), ...set(s),
      ...elements(number(half), left, [p, q, c, s], (load, store) => [
        ...load(p), ...set(x), ...load(q), ...set(y),
        ...store(p, subtract(times(get(x), load(c)), times(get(y), load(s)))),
        ...store(q, add(times(get(y), load(c)), times(get(x), load(s)))),
      ]),
      ...get(q), ...set(p),
    ]),
  ], pages);
}

/**
 * softmax(scores, stride, rows, start, step, window, seen): turns scores into weights. A row sees `window` positions, up
 * to `start`, which grows by `step` with every row; the weights of all others of `seen` become 0.
 */
function emitSoftmax(cap, pages) {
  const [scores, stride, rows, start, step, window, seen] = Array(7).keys();
  return overRows(7, rows, [[scores, stride], [start, step]], ([left, p, first, oldest, count], [most, sum, x, a, b]) => {
    const every = body => [...get(first), ...set(p), ...elements(get(count), left, [p], body)];
    const before = [...get(start), ...number(1), ADD, ...get(window), SUB];
    return [
      ...before, ...number(0), ...before, ...number(0), GT_S, SELECT, ...set(oldest),
      ...get(start), ...number(1), ADD, ...get(oldest), SUB, ...set(count),
      ...get(scores), ...get(oldest), ...number(4), MUL, ADD, ...set(first),
      ...constant(-Infinity), ...set(most), ...constant(0), ...set(sum),
      ...(cap ? every((load, store) => [...load(p), ...set(x),
        ...store(p, times(tanh(times(get(x), constant(1 / cap)), a, b), constant(cap)))]) : []),
      ...every(load => [...load(p), ...get(most), ...simd(F_MAX), ...set(most)]), ...across(F_MAX, most),
      ...every((load, store, own) => [
        ...exponential(subtract(load(p), get(most)), a, b), ...set(x), ...store(p, get(x)),
        ...add(get(sum), own(get(x))), ...set(sum),
      ]),
      ...across(F_ADD, sum), ...divide(constant(1), get(sum)), ...set(sum),
      ...every((load, store) => store(p, times(load(p), get(sum)))),
      ...when(get(oldest), clear(get(scores), [...get(oldest), ...number(4), MUL])),
      ...clear(get(p), [...get(seen), ...get(start), SUB, ...number(1), SUB, ...number(4), MUL]),
    ];
  }, pages);
}

/** activate(data, stride, size, rows): data = act(data), times the `size` elements after it if it is gated. */
function emitActivate(activation, gated, pages) {
  const [data, stride, size, rows] = Array(4).keys();
  return overRows(4, rows, [[data, stride]], ([left, p, q], [x, a, b, c]) => [
    ...get(data), ...set(p), ...get(data), ...get(size), ...number(4), MUL, ADD, ...set(q),
    ...elements(get(size), left, [p, q], (load, store) => {
      const value = ACTIVATIONS[activation](x, a, b, c);
      return [...load(p), ...set(x), ...store(p, gated ? times(value, load(q)) : value)];
    }),
  ], pages);
}

/** Compiles the functions for a model over a memory. */
export function compileRows(config, memory, pages = 0) {
  const { normEps, activation, gated, softCap, frequencies } = config, here = bytes => compile(bytes, memory);
  return {
    add: here(emitAdd(pages)),
    rmsNorm: here(emitNormalize(false, normEps, pages)),
    layerNorm: here(emitNormalize(true, normEps, pages)),
    rotate: frequencies && here(emitRotate(frequencies.length, pages)),
    softmax: here(emitSoftmax(softCap, pages)),
    activate: here(emitActivate(activation, gated, pages)),
  };
}
