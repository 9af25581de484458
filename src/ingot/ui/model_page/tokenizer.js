// Byte-level BPE and character tokenizers, read from a tokenizer.json.

// GPT-2's split pattern. \p{space} instead of \s, because JavaScript's \s contains U+FEFF and lacks U+0085.
const WORDS = /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\p{space}\p{L}\p{N}]+|\p{space}+(?!\P{space})|\p{space}+/gu;

// Byte-level vocabularies spell each byte as a printable character: printable bytes as themselves, the others from U+0100 on.
let next = 256;
const isPrintable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
const LETTERS = Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isPrintable(byte) ? byte : next++));
const BYTES = new Map(LETTERS.map((letter, byte) => [letter, byte]));

export class Tokenizer {
  constructor({ model, pre_tokenizer: splitter, added_tokens: added = [] }) {
    this.ids = new Map(Object.entries(model.vocab));
    this.ranks = new Map(model.merges.map((pair, rank) => [typeof pair === "string" ? pair : pair.join(" "), rank]));
    this.byteLevel = splitter !== null;
    this.splits = this.byteLevel && splitter.use_regex !== false;
    this.bytes = []; // by id; special tokens have none
    for (const [token, id] of this.ids) this.bytes[id] = this.#spelled(token);
    for (const { id } of added) this.bytes[id] = new Uint8Array();
  }

  #spelled(token) {
    const bytes = this.byteLevel ? [...token].map((letter) => BYTES.get(letter)) : [undefined];
    return bytes.includes(undefined) ? new TextEncoder().encode(token) : Uint8Array.from(bytes);
  }

  encode(text) {
    if (!this.byteLevel) return [...text].map((character) => this.#id(character));
    const words = this.splits ? text.match(WORDS) ?? [] : [text];
    return words.flatMap((word) => this.#merged(Array.from(new TextEncoder().encode(word), (byte) => LETTERS[byte])));
  }

  #merged(parts) {
    while (this.ranks.size) {
      let [best, at] = [Infinity, 0];
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(`${parts[i]} ${parts[i + 1]}`);
        if (rank < best) [best, at] = [rank, i];
      }
      if (best === Infinity) break;
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
    return parts.map((part) => this.#id(part));
  }

  #id(part) {
    const id = this.ids.get(part);
    if (id === undefined) throw new Error(`${JSON.stringify(part)} is not in the model's vocabulary; remove it from the prompt`);
    return id;
  }
}
