// What the engines of both kinds, WebAssembly and WebGPU, have in common.

export const PART = 64; // tokens of a prompt that run together
const RUN = 1024; // positions of a run, whose angle is reduced modulo 2 pi in float64, as in training

/** Reads a safetensors file of float32 tensors: name -> { data, shape }. */
export function readTensors(buffer) {
  const size = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  const start = 8 + size, tensors = {};
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [first, last] = entry.data_offsets;
    // The header's length need not be a multiple of four.
    const aligned = (start + first) % 4 === 0;
    const data = aligned ? new Float32Array(buffer, start + first, (last - first) / 4)
      : new Float32Array(buffer.slice(start + first, start + last));
    tensors[name] = { data, shape: entry.shape };
  }
  return tensors;
}

/** Throws an error if the model does not know a token, or its cache has no room for the tokens. */
export function checkTokens(tokens, start, { vocabulary }, capacity) {
  const unknown = tokens.find(token => !(token >= 0 && token < vocabulary));
  if (unknown !== undefined) throw new Error(`the model has ${vocabulary} token ids; found ${unknown}`);
  if (start + tokens.length > capacity) throw new Error(`the cache has room for ${capacity} tokens`);
}

/** Returns cosines and sines [count, width / 2] of the angles that rotary positions turn by, multiplied by a factor. */
export function angles(frequencies, start, count, factor = 1) {
  const half = frequencies.length, cos = new Float32Array(count * half), sin = new Float32Array(count * half);
  for (let row = 0; row < count; row++)
    for (let i = 0; i < half; i++) {
      const position = start + row, run = Math.floor(position / RUN);
      const angle = run * ((frequencies[i] * RUN) % (2 * Math.PI)) + (position % RUN) * frequencies[i];
      cos[row * half + i] = factor * Math.cos(angle);
      sin[row * half + i] = factor * Math.sin(angle);
    }
  return { cos, sin };
}
