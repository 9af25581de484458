// The page: asks the worker for one token at a time, so that it never waits for the model and can stop after any token.
const at = (id) => document.getElementById(id);
const worker = new Worker("worker.js", { type: "module" });

function ask(action, options) {
  return new Promise((resolve, reject) => {
    worker.onerror = (event) => reject(new Error(event.message ?? "the browser cannot run this page; use a recent one"));
    worker.onmessage = ({ data }) => {
      if ("progress" in data) at("progress").value = data.progress;
      else data.error === undefined ? resolve(data.result) : reject(new Error(data.error));
    };
    worker.postMessage({ action, ...options });
  });
}

let [running, stopped] = [true, false]; // running also while the model loads

async function write() {
  const [limit, began] = [at("tokens").valueAsNumber, performance.now()];
  const [prompt, temperature, topK] = [at("prompt").value, at("temperature").valueAsNumber, at("top-k").valueAsNumber || 0];
  [at("prompted").textContent, at("text").textContent] = [prompt, ""];
  await ask("start", { prompt, temperature, topK });
  for (let count = 1; !stopped && count <= limit; count++) {
    at("text").append(await ask("next"));
    const rate = (1000 * count) / (performance.now() - began);
    at("status").textContent = `${count} tokens, ${rate.toFixed(rate < 10 ? 1 : 0)} tokens per second`;
  }
  at("text").append(await ask("end"));
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  stopped = running;
  if (running) return;
  [running, at("write").textContent, at("result").dataset.state, at("status").className] = [true, "Stop", "writing", "note"];
  await write().catch(fail);
  [running, at("write").textContent, at("result").dataset.state] = [false, "Write", "written"];
});

at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});

function fail(error) {
  [at("status").textContent, at("status").className] = [error.message, "error"];
}

function ready({ family, context, dtype }) {
  [at("summary").textContent, at("status").textContent] = [`${family}, ${context} tokens of context, ${dtype}`, "ready"];
  running = at("write").disabled = false;
}

await ask("load").then(ready).catch(fail);
at("progress").hidden = true;
