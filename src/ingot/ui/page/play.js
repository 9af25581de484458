// The playground: generates text with a run's model and shows the probability and the bits of every token.
import { ask, fixed, h, store, whole } from "./store.js";

const ALTERNATIVES = 5;
const DULL_BITS = 8; // tokens with at least this many bits get the full colour

export function playTab() {
  const prompt = h("textarea", { id: "prompt", rows: 4, placeholder: "Prompt; leave empty for a new document", value: "" });
  const inputs = {
    max_tokens: number("tokens", 100, 1, 4000, 1),
    temperature: number("temperature", 0.8, 0, 10, 0.1),
    top_p: number("top-p", 1, 0.01, 1, 0.05),
    seed: number("seed", 1, 0, 1e9, 1),
  };
  const secret = h("input", { type: "password", id: "open-token", placeholder: "the token that ingot ui printed", autocomplete: "off" });
  const choice = h("select", { id: "model", "aria-label": "Run that generates" });
  const go = h("button", { type: "button", class: "strong", id: "write" }, "Write");
  const text = h("div", { class: "written", id: "written" });
  const about = h("div", { class: "about" }, "Point at a token to see its probability.");
  const said = h("p", { class: "note", id: "said" });
  const scale = h("p", { class: "scale" }, "bits per token: 0 ", h("i"), ` ${DULL_BITS} and more`);
  const element = h("div", { class: "play" }, h("div", { class: "controls" }, choice, Object.values(inputs).map((one) => one.label), h("label", {}, "token ", secret), go), prompt, said,
    h("div", { class: "result", hidden: true }, text, h("aside", {}, about, scale)));
  let leaving = null;

  go.addEventListener("click", async () => {
    if (leaving) { leaving.abort(); return; }
    leaving = new AbortController();
    go.textContent = "Stop";
    element.lastElementChild.hidden = false;
    text.replaceChildren();
    try {
      const given = secret.value.trim() || (sessionStorage.getItem("token") ?? "");
      await write(choice.value, request(), given, text, about, said, leaving.signal);
    } catch (error) {
      if (error.name !== "AbortError") said.textContent = error.message;
    }
    leaving = null;
    go.textContent = "Write";
  });

  function request() {
    const asked = Object.fromEntries(Object.entries(inputs).map(([name, { input }]) => [name, Number(input.value)]));
    return { ...asked, prompt: prompt.value, logprobs: ALTERNATIVES, echo: true, stream: true };
  }

  return {
    element,
    draw() {
      const runs = [...store.runs.values()].filter((run) => run.checkpoint);
      const known = [...choice.options].map((option) => option.value).join();
      if (known !== runs.map((run) => run.id).join()) {
        const before = choice.value || store.current;
        choice.replaceChildren(...runs.map((run) => h("option", { value: run.id }, run.name)));
        choice.value = runs.some((run) => run.id === before) ? before : runs[0]?.id ?? "";
      }
      go.disabled = !runs.length;
      if (!runs.length) said.textContent = "No run has a checkpoint yet.";
    },
  };
}

function number(words, value, min, max, step) {
  const input = h("input", { type: "number", value, min, max, step });
  return { input, label: h("label", {}, `${words} `, input) };
}

async function write(id, body, secret, text, about, said, signal) {
  said.textContent = "opening the model";
  const headers = { Authorization: `Bearer ${secret}` };
  const model = await ask(`/api/runs/${id}/open`, { method: "POST", headers, signal });
  sessionStorage.setItem("token", secret);
  const of = `${model.checkpoint} on ${model.device}`;
  said.textContent = `${of}: writing`;
  const answer = await fetch(`/api/runs/${id}/completions`, { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const count = { tokens: 0, bytes: 0, bits: 0 };
  for await (const record of events(answer.body)) {
    if (record.error) throw new Error(record.error.message);
    const { logprobs } = record.choices[0] ?? {};
    logprobs?.tokens.forEach((word, i) => text.append(token(word, logprobs.token_logprobs[i], logprobs.top_logprobs?.[i], about, count)));
    const rate = count.bytes ? `, ${fixed(count.bits / count.bytes, 3)} bits per byte` : "";
    said.textContent = `${of}: ${whole(count.tokens)} tokens, ${whole(count.bytes)} bytes${rate}`;
  }
}

// Yield the JSON of server-sent events.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    left += value;
    const parts = left.split("\n\n");
    left = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

const visible = (word) => word.replace(/\n/g, "↵").replace(/\t/g, "⇥");
const bitsOf = (logprob) => -logprob / Math.LN2;

function token(word, logprob, top, about, count) {
  const special = /^<\|token \d+\|>$/.test(word), raw = word.startsWith("bytes:");
  const bytes = special ? 0 : raw ? (word.length - 6) / 4 : new TextEncoder().encode(word).length;
  count.tokens += 1;
  if (logprob != null) {
    count.bits += bitsOf(logprob);
    count.bytes += bytes;
  }
  const shown = raw ? word.slice(6) : word;
  const span = h("span", { class: special || raw ? "token special" : "token", tabIndex: 0 }, shown);
  if (logprob != null) span.style.setProperty("--bits", Math.min(1, bitsOf(logprob) / DULL_BITS));
  const tell = () => about.replaceChildren(...describe(shown, logprob, top));
  span.addEventListener("pointerenter", tell);
  span.addEventListener("focus", tell);
  return span;
}

function describe(word, logprob, top) {
  if (logprob == null) return [h("b", { class: "word" }, visible(word)), h("p", {}, "the first token, which has no probability")];
  const rows = Object.entries({ ...top, [word]: logprob }).sort((a, b) => b[1] - a[1]).map(([other, value]) => {
    const share = h("i", { class: "share" });
    share.style.setProperty("--used", Math.exp(value));
    return h("div", { class: other === word ? "row chosen" : "row" }, h("span", {}, visible(other)), share, h("small", {}, `${fixed(100 * Math.exp(value), 1)}%`));
  });
  return [h("b", { class: "word" }, visible(word)), h("p", {}, `probability ${fixed(100 * Math.exp(logprob), 2)}%, ${fixed(bitsOf(logprob), 2)} bits`), ...rows];
}
