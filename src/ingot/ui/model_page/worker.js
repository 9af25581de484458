// Runs the model in a thread of its own: loads the files of the folder, then returns one token of text per message.
import * as ort from "./onnxruntime/ort.wasm.bundle.min.mjs";
import { Tokenizer } from "./tokenizer.js";

const CHUNK = 64; // tokens per evaluation of a prompt, because the logits of all of them are returned

let config, tokenizer, session, run;

async function download(name, onBytes) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} cannot be loaded: ${response.status} ${response.statusText}`);
  const total = Number(response.headers.get("Content-Length"));
  const counter = new TransformStream({ transform(chunk, output) { onBytes?.(chunk.length, total); output.enqueue(chunk); } });
  return new Response(response.body.pipeThrough(counter)).arrayBuffer();
}

const text = async (name) => new TextDecoder().decode(await download(name));

async function openTokenizer() { // GPT-2's has two files
  if (config.tokenizer_files.includes("tokenizer.json")) return new Tokenizer(JSON.parse(await text("tokenizer.json")));
  const [vocab, merges] = [JSON.parse(await text("vocab.json")), (await text("merges.txt")).trim().split("\n").slice(1)];
  return new Tokenizer({ model: { vocab, merges }, pre_tokenizer: {}, added_tokens: [{ id: config.bos_token_id }] });
}

async function load() {
  const files = ["model.onnx", "onnxruntime/ort-wasm-simd-threaded.wasm.gz"];
  const [loaded, totals] = [files.map(() => 0), files.map(() => 0)];
  const downloads = files.map((name, i) => download(name, (bytes, total) => {
    [loaded[i], totals[i]] = [loaded[i] + bytes, total];
    if (totals.every(Boolean)) postMessage({ progress: Math.min(1, (loaded[0] + loaded[1]) / (totals[0] + totals[1])) });
  }));
  config = JSON.parse(await text("config.json"));
  tokenizer = await openTokenizer();
  const [model, packed] = await Promise.all(downloads);
  const isPacked = new Uint8Array(packed, 0, 1)[0] === 0x1f; // some servers unpack a .gz file themselves
  const stream = new Blob([packed]).stream();
  const unpacked = new Response(isPacked ? stream.pipeThrough(new DecompressionStream("gzip")) : stream);
  ort.env.logLevel = "error";
  ort.env.wasm.numThreads = 1; // more threads need headers that a plain file server does not send
  ort.env.wasm.wasmBinary = await unpacked.arrayBuffer();
  session = await ort.InferenceSession.create(model);
  return config;
}

function emptyCache() {
  if (!config.cache) return null;
  const [type, none] = config.dtype === "fp16" ? ["float16", new Uint16Array()] : ["float32", new Float32Array()];
  const names = session.inputNames.filter((name) => name !== "input_ids");
  return Object.fromEntries(names.map((name) => [name, new ort.Tensor(type, none, [1, config.kv_heads, 0, config.head_size])]));
}

function start({ prompt, temperature, topK }) {
  const ids = [...(config.bos_token_id === null ? [] : [config.bos_token_id]), ...tokenizer.encode(prompt)];
  if (!ids.length) ids.push(tokenizer.ids.get("\n") ?? 0);
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  run = { new: ids, seen: [], cache: emptyCache(), cached: 0, decoder, temperature, topK };
}

// Append the new tokens and return the logits of the next one. As in `ingot generate`, the cache is dropped once the context is
// full: from then on the last `context` tokens are evaluated again for each token.
async function logits() {
  run.seen = [...run.seen, ...run.new].slice(-config.context);
  if (run.cached + run.new.length > config.context) run.cache = null;
  let [tokens, cache, last] = run.cache ? [run.new, run.cache, null] : [run.seen, emptyCache(), null];
  while (tokens.length) {
    const chunk = tokens.slice(0, cache ? CHUNK : tokens.length);
    tokens = tokens.slice(chunk.length);
    const input_ids = new ort.Tensor("int64", BigInt64Array.from(chunk, BigInt), [1, chunk.length]);
    const outputs = await session.run({ input_ids, ...cache });
    const { dims, data } = outputs.logits;
    last = data.subarray((chunk.length - 1) * dims[2], (chunk.length - 1) * dims[2] + tokenizer.bytes.length);
    for (const name in cache ?? {}) cache[name] = outputs[name.replace("past_key_values", "present")];
  }
  run.cached += run.new.length;
  return last;
}

function choose(scores, temperature, topK) {
  const best = scores.reduce((top, score) => Math.max(top, score), -Infinity);
  if (!Number.isFinite(best)) throw new Error("the logits are not finite: the weights are damaged");
  if (temperature === 0) return scores.indexOf(best);
  const lowest = topK > 0 && topK < scores.length ? Float32Array.from(scores).sort()[scores.length - topK] : -Infinity;
  const weights = Float64Array.from(scores, (score) => (score >= lowest ? Math.exp((score - best) / temperature) : 0));
  let left = Math.random() * weights.reduce((sum, weight) => sum + weight, 0);
  const chosen = weights.findIndex((weight) => (left -= weight) < 0);
  return chosen < 0 ? scores.indexOf(best) : chosen; // rounding can leave a rest
}

async function next() {
  const id = choose(await logits(), run.temperature, run.topK);
  run.new = [id];
  return run.decoder.decode(tokenizer.bytes[id], { stream: true });
}

const actions = { load, start, next, end: () => run.decoder.decode() };

onmessage = async ({ data: { action, ...options } }) => {
  try {
    postMessage({ result: await actions[action](options) });
  } catch (error) {
    postMessage({ error: error.message ?? String(error) });
  }
};
