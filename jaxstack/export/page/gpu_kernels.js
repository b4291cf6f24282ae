// Programs for WebGPU in WGSL, generated here for the model and for each tile of matrices to try.
//
// Matrices [k, n] are stored by rows, with n padded to whole tiles; so are rows of activations. All arithmetic is in
// float32.

export const TILE = 64; // columns; a multiple of the width of every candidate's tile
const LOWEST = "-3e38";

const part = ["part", "uniform", "Part"]; // a part of a prompt, see PART
/** count: its tokens; start: position of the first; first: the first row that a norm reads. */
const PART = "struct Part { count: u32, start: u32, first: u32, unused: u32 }";

/** Returns { code, kinds }: a program with bindings [name, "read" | "write" | "uniform", type] in their order. */
function program(bindings, structs, body) {
  const space = { read: "storage, read", write: "storage, read_write", uniform: "uniform" };
  const declared = bindings.map(([name, kind, type], i) => `@group(0) @binding(${i}) var<${space[kind]}> ${name}: ${type};`);
  return { code: [PART, ...structs, ...declared, body].join("\n"), kinds: bindings.map(([, kind]) => kind) };
}

const main = (size, body) => `@compute @workgroup_size(${size})
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_id) lane: vec3u,
        @builtin(local_invocation_index) index: u32) {
${body}
}`;

const times = (count, text) => Array.from({ length: count }, (_, i) => text(i)).join("\n");

const PRODUCT = [
  ["x", "read", "array<f32>"], ["w", "read", "array<vec4f>"], ["bias", "read", "array<vec4f>"],
  ["result", "write", "array<vec4f>"], ["shape", "uniform", "Shape"],
];
/** k: elements of a row of x; columns: vectors of a row of w; stride: of the rows of x; add: 1 to add to the result. */
const SHAPE = "struct Shape { k: u32, columns: u32, stride: u32, add: u32 }";
const WRITE = `fn write(at: u32, column: u32, value: vec4f) {
  var sum = value + bias[column];
  if (shape.add == 1u) { sum += result[at]; }
  result[at] = sum;
}`;

/** A product of one row: a workgroup has `lanes` vectors of columns, each summed in `slices` parts of k, unrolled. */
function oneRow({ lanes, slices, unroll }) {
  const step = offset => `sum += x[k + ${offset}u] * w[(k + ${offset}u) * shape.columns + column];`;
  return program(PRODUCT, [SHAPE], `var<workgroup> sums: array<vec4f, ${lanes * slices}>;
${WRITE}
${main(`${lanes}, ${slices}`, `  let column = group.x * ${lanes}u + lane.x;
  var sum = vec4f();
  var k = lane.y;
  for (; k + ${(unroll - 1) * slices}u < shape.k; k += ${unroll * slices}u) {
${times(unroll, i => step(i * slices))}
  }
  for (; k < shape.k; k += ${slices}u) { ${step(0)} }
  sums[index] = sum;
  workgroupBarrier();
  if (lane.y == 0u) {
    for (var i = 1u; i < ${slices}u; i++) { sum += sums[i * ${lanes}u + lane.x]; }
    write(column, column, sum);
  }`)}`);
}

/** A product of many rows: a workgroup has `rows` x 4 `lanes` sums, a thread `mr` rows, and `deep` of k at a time. */
function manyRows({ rows, lanes, deep, mr }) {
  const threads = (lanes * rows) / mr;
  return program(PRODUCT, [SHAPE], `var<workgroup> left: array<f32, ${deep * rows}>;
var<workgroup> right: array<vec4f, ${deep * lanes}>;
${WRITE}
${main(`${lanes}, ${rows / mr}`, `  let row = group.y * ${rows}u;
  let column = group.x * ${lanes}u;
${times(mr, i => `  var sum${i} = vec4f();`)}
  for (var first = 0u; first < shape.k; first += ${deep}u) {
    for (var i = index; i < ${deep * rows}u; i += ${threads}u) {
      let k = first + i % ${deep}u;
      let value = x[(row + i / ${deep}u) * shape.stride + k];
      left[(i % ${deep}u) * ${rows}u + i / ${deep}u] = select(0.0, value, k < shape.k);
    }
    for (var i = index; i < ${deep * lanes}u; i += ${threads}u) {
      let k = first + i / ${lanes}u;
      right[i] = select(vec4f(), w[k * shape.columns + column + i % ${lanes}u], k < shape.k);
    }
    workgroupBarrier();
    for (var k = 0u; k < ${deep}u; k++) {
      let value = right[k * ${lanes}u + lane.x];
      let at = k * ${rows}u + lane.y * ${mr}u;
${times(mr, i => `      sum${i} += left[at + ${i}u] * value;`)}
    }
    workgroupBarrier();
  }
  let to = (row + lane.y * ${mr}u) * shape.columns + column + lane.x;
${times(mr, i => `  write(to + ${i}u * shape.columns, column + lane.x, sum${i});`)}`)}`);
}

/** Returns make(...) for every combination of one value from each list. */
const every = ([first, ...others], make) =>
  first ? first.flatMap(one => every(others, (...more) => make(one, ...more))) : [make()];

/** Returns up to `most` programs of each kind: { one, many }, lists of { title, code, kinds, grid(columns, rows) }. */
export function productCandidates(most) {
  const one = every([[4, 8, 16], [4, 8, 16], [1, 4]], (lanes, slices, unroll) => ({
    ...oneRow({ lanes, slices, unroll }), title: `${4 * lanes} columns, ${slices} slices, unroll ${unroll}`,
    grid: columns => [columns / lanes, 1],
  }));
  const many = every([[16, 32, 64], [8, 16], [8, 16], [4, 8]], (rows, lanes, deep, mr) => ({
    ...manyRows({ rows, lanes, deep, mr }), title: `${rows} x ${4 * lanes}, ${mr} rows a thread, ${deep} deep`,
    grid: (columns, count) => [columns / lanes, Math.ceil(count / rows)],
  }));
  return { one: one.slice(0, most), many: many.slice(0, most) };
}

/** Returns WGSL that sums a value over the 64 threads of a workgroup into `sums[0]`. */
const total = value => `sums[index] = ${value};
workgroupBarrier();
for (var width = 32u; width > 0u; width /= 2u) {
  if (index < width) { sums[index] += sums[index + width]; }
  workgroupBarrier();
}`;

/** Returns WGSL for a row's `mean` and `factor`: its normalized elements are (read(i) - mean) * factor. */
const moments = (size, centred, eps, read) => `var part_sum = 0.0;
${centred ? `for (var i = index; i < ${size}; i += 64u) { part_sum += ${read("i")}; }
${total("part_sum")}
let mean = sums[0] / f32(${size});
workgroupBarrier();
part_sum = 0.0;` : "let mean = 0.0;"}
for (var i = index; i < ${size}; i += 64u) { let d = ${read("i")} - mean; part_sum += d * d; }
${total("part_sum")}
let factor = inverseSqrt(sums[0] / f32(${size}) + ${eps});`;

/** A norm of rows [count, size], read and written with the strides `from` and `to`; `add` adds it to the target. */
export function norm({ size, from, to, centred, eps, add }) {
  const bindings = [
    ["source", "read", "array<f32>"], ["weights", "read", "array<f32>"], ["result", "write", "array<f32>"], part,
  ];
  const value = `(source[at + i] - mean) * factor * weights[i] + weights[${size}u + i]`;
  return program(bindings, [], `var<workgroup> sums: array<f32, 64>;
${main(64, `let at = (part.first + group.x) * ${from}u;
${moments(`${size}u`, centred, eps, i => `source[at + ${i}]`)}
for (var i = index; i < ${size}u; i += 64u) { result[group.x * ${to}u + i] ${add ? "+=" : "="} ${value}; }`)}`);
}

/** Looks up rows of a table [vocabulary, hidden], or with `columns` the columns of a tied head [hidden, columns]. */
export function embed({ hidden, stride, columns, scale, positions }) {
  const bindings = [
    ["tokens", "read", "array<u32>"], ["words", "read", "array<f32>"], ["places", "read", "array<f32>"],
    ["x", "write", "array<f32>"], part,
  ];
  const word = columns ? `words[i * ${columns}u + token]` : `words[token * ${hidden}u + i]`;
  const place = positions ? ` + places[(part.start + group.y) * ${hidden}u + i]` : "";
  return program(bindings, [], main(64, `let i = group.x * 64u + lane.x;
let token = tokens[group.y];
if (i < ${hidden}u) { x[group.y * ${stride}u + i] = ${word} * ${scale}${place}; }`));
}

/** Applies head norms and rotations; writes queries, and keys and values to the cache [head, capacity, width]. */
export function place({ heads, kvHeads, width, stride, capacity, scale, normed, centred, eps, rotated }) {
  const bindings = [
    ["qkv", "read", "array<f32>"], ["weights", "read", "array<f32>"], ["turns", "read", "array<vec2f>"],
    ["queries", "write", "array<f32>"], ["keys", "write", "array<f32>"], ["values", "write", "array<f32>"], part,
  ];
  const half = width / 2;
  // Weights: scales and biases of queries, then of keys.
  const normalize = `let side = select(0u, ${2 * width}u, head >= ${heads}u);
${moments(`${width}u`, centred, eps, i => `head_values[${i}]`)}
workgroupBarrier();
for (var i = index; i < ${width}u; i += 64u) {
  head_values[i] = (head_values[i] - mean) * factor * weights[side + i] + weights[side + ${width}u + i];
}
workgroupBarrier();`;
  const rotate = `for (var i = index; i < ${half}u; i += 64u) {
  let turn = turns[row * ${half}u + i];
  let first = head_values[i];
  let second = head_values[${half}u + i];
  head_values[i] = first * turn.x - second * turn.y;
  head_values[${half}u + i] = second * turn.x + first * turn.y;
}
workgroupBarrier();`;
  return program(bindings, [], `var<workgroup> sums: array<f32, 64>;
var<workgroup> head_values: array<f32, ${width}>;
${main(64, `let head = group.x;
let row = group.y;
for (var i = index; i < ${width}u; i += 64u) { head_values[i] = qkv[row * ${stride}u + head * ${width}u + i]; }
workgroupBarrier();
if (head < ${heads + kvHeads}u) {
${normed ? normalize : ""}
${rotated ? rotate : ""}
}
let position = part.start + row;
for (var i = index; i < ${width}u; i += 64u) {
  if (head < ${heads}u) { queries[(row * ${heads}u + head) * ${width}u + i] = head_values[i] * ${scale}; }
  else {
    let side = (head - ${heads}u) / ${kvHeads}u;
    let at = (((head - ${heads}u) % ${kvHeads}u) * ${capacity}u + position) * ${width}u + i;
    if (side == 0u) { keys[at] = head_values[i]; } else { values[at] = head_values[i]; }
  }
}`)}`);
}

const capped = (value, cap) => cap ? `(tanh(clamp(${value} / ${cap}, -15.0, 15.0)) * ${cap})` : value;

/** Attention; a workgroup has one query head and row: softmax over the positions, `threads` of them at a time. */
export function attend({ heads, kvHeads, width, capacity, window, cap, threads }) {
  const bindings = [
    ["queries", "read", "array<f32>"], ["keys", "read", "array<f32>"], ["values", "read", "array<f32>"],
    ["attended", "write", "array<f32>"], part,
  ];
  const own = Math.ceil(width / threads), all = text => times(own, text); // elements of a thread: lane, lane + threads, ...
  return program(bindings, [], `var<workgroup> query: array<f32, ${width}>;
var<workgroup> scores: array<f32, ${threads}>;
${main(threads, `let head = group.x;
let row = group.y;
let newest = part.start + row;
let oldest = ${window ? `select(0u, newest - ${window - 1}u, newest >= ${window}u)` : "0u"};
let first = (head / ${heads / kvHeads}u) * ${capacity}u;
for (var i = index; i < ${width}u; i += ${threads}u) { query[i] = queries[(row * ${heads}u + head) * ${width}u + i]; }
var most = ${LOWEST};
var sum = 0.0;
${all(i => `var mixed${i} = 0.0;`)}
for (var block = oldest; block <= newest; block += ${threads}u) {
  workgroupBarrier();
  var score = ${LOWEST};
  if (block + index <= newest) {
    let at = (first + block + index) * ${width}u;
    score = 0.0;
    for (var i = 0u; i < ${width}u; i++) { score += query[i] * keys[at + i]; }
    score = ${capped("score", cap)};
  }
  scores[index] = score;
  workgroupBarrier();
  var highest = most;
  for (var i = 0u; i < ${threads}u; i++) { highest = max(highest, scores[i]); }
  workgroupBarrier();
  scores[index] = select(0.0, exp(score - highest), block + index <= newest);
  workgroupBarrier();
  let rescale = exp(max(most - highest, -80.0));
  most = highest;
  sum *= rescale;
${all(i => `mixed${i} *= rescale;`)}
  for (var i = 0u; i < min(${threads}u, newest + 1u - block); i++) {
    let weight = scores[i];
    let at = (first + block + i) * ${width}u + index;
    sum += weight;
${all(i => `mixed${i} += weight * values[at + ${i * threads}u];`)}
  }
}
let to = (row * ${heads}u + head) * ${width}u + index;
${all(i => `if (index + ${i * threads}u < ${width}u) { attended[to + ${i * threads}u] = mixed${i} / sum; }`)}`)}`);
}

/** Activations as WGSL of x; erf by Abramowitz and Stegun 7.1.26, error 2e-7. */
const ACTIVATIONS = {
  silu: "x / (1.0 + exp(-x))",
  gelu: "0.5 * x * (1.0 + erf(x * 0.70710678))",
  gelu_tanh: "0.5 * x * (1.0 + tanh(clamp(0.79788456 * (x + 0.044715 * x * x * x), -15.0, 15.0)))",
  relu: "max(x, 0.0)",
  relu_squared: "max(x, 0.0) * max(x, 0.0)",
};
const ERF = `fn erf(x: f32) -> f32 {
  let t = 1.0 / (1.0 + 0.3275911 * abs(x));
  let series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  return sign(x) * (1.0 - series * exp(-x * x));
}`;

/** The activation of rows [count, size], `stride` apart, times the `size` numbers after them if it is gated. */
export function activate({ activation, size, stride, gated }) {
  const bindings = [["wide", "read", "array<f32>"], ["result", "write", "array<f32>"]];
  return program(bindings, [], `${ERF}
fn act(x: f32) -> f32 { return ${ACTIVATIONS[activation]}; }
${main(64, `let i = group.x * 64u + lane.x;
let at = group.y * ${stride}u + i;
if (i < ${size}u) { result[group.y * ${size}u + i] = act(wide[at])${gated ? ` * wide[at + ${size}u]` : ""}; }`)}`);
}
