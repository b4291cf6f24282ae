// Tokenizers of bytes, byte-level BPE (Sennrich et al. 2016) and SentencePiece's BPE, from the tokens and merges in tokenizer_page.json.

const MARK = "\u2581";

/** UTF-8 bytes as ids. */
class ByteTokenizer {
  encode(text) {
    return [...new TextEncoder().encode(text)];
  }

  bytes(id) {
    return id < 256 ? [id] : [];
  }
}

/** BPE of bytes or characters: words of the patterns, each merged in the order in which the merges were learned. */
class SubwordTokenizer {
  /** @param description of `describe_tokenizer` in jaxstack/export/web.py. */
  constructor({ tokens, merges, byteIds, patterns, normalizer, whole, added, characters, prefix }) {
    this.characters = characters && new Map(Object.entries(characters));
    this.prefix = prefix;
    this.tokens = tokens.map(text => (text.match(/../g) ?? []).map(pair => parseInt(pair, 16)));
    this.byteIds = byteIds;
    this.ranks = new Map(merges.map(([left, right, merged], rank) => [this.key(left, right), { rank, merged }]));
    this.patterns = patterns.map(source => new RegExp(source, "gu"));
    this.normalizer = normalizer;
    this.added = new Map(Object.entries(added));
    const escaped = Object.keys(added).sort((a, b) => b.length - a.length).map(escape);
    this.addedPattern = escaped.length ? new RegExp(escaped.join("|"), "gu") : null;
    this.whole = whole ? new Map(tokens.map((text, id) => [text, id])) : null;
    this.cache = new Map();
  }

  key(left, right) {
    return left * 2 ** 26 + right;
  }

  encode(text) {
    const parts = this.addedPattern ? split(text, this.addedPattern) : [text];
    return parts.flatMap(part => (this.added.has(part) ? [this.added.get(part)] : this.encodePart(part)));
  }

  encodePart(text) {
    if (this.normalizer) text = text.normalize(this.normalizer);
    if (this.characters) text = this.markSpaces(text);
    let words = [text];
    for (const pattern of this.patterns) words = words.flatMap(word => split(word, pattern));
    return words.flatMap(word => this.encodeWord(word));
  }

  /** Writes SentencePiece's mark for each space, and before a text if it begins with one. */
  markSpaces(text) {
    const marked = text.replaceAll(" ", MARK), begins = this.prefix === "missing" && marked.startsWith(MARK);
    return this.prefix && text && !begins ? MARK + marked : marked;
  }

  /** Returns the ids that merging starts from: those of bytes, or of characters and the bytes of unknown ones. */
  smallest(word, bytes) {
    if (!this.characters) return bytes.map(byte => this.byteIds[byte]);
    const encoder = new TextEncoder(), unknown = c => [...encoder.encode(c)].map(byte => this.byteIds[byte]);
    return [...word].flatMap(c => this.characters.get(c) ?? unknown(c));
  }

  encodeWord(word) {
    const found = this.cache.get(word);
    if (found) return found;
    const bytes = [...new TextEncoder().encode(word)];
    const hex = bytes.map(byte => byte.toString(16).padStart(2, "0")).join("");
    const known = this.whole?.get(hex);
    const ids = known === undefined || !hex ? this.merge(this.smallest(word, bytes)) : [known];
    this.cache.set(word, ids);
    return ids;
  }

  merge(ids) {
    for (;;) {
      let best = null;
      for (let i = 0; i + 1 < ids.length; i++) {
        const pair = this.ranks.get(this.key(ids[i], ids[i + 1]));
        if (pair && (!best || pair.rank < best.pair.rank)) best = { i, pair };
      }
      if (!best) return ids;
      ids.splice(best.i, 2, best.pair.merged);
    }
  }

  bytes(id) {
    return this.tokens[id] ?? [];
  }
}

const escape = text => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");

/** Splits a text into the matches of a pattern and what is between them. */
function split(text, pattern) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > end) parts.push(text.slice(end, match.index));
    if (match[0]) parts.push(match[0]);
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}

/** Returns the tokenizer of a description. */
export function makeTokenizer(description) {
  return description.kind === "byte" ? new ByteTokenizer() : new SubwordTokenizer(description);
}
