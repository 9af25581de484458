// The list of runs in the sidebar, and the metrics of the current run above the tabs.
import { ask, budget, changed, colour, duration, fixed, h, isDark, short, store, whole } from "./store.js";

const list = document.getElementById("runs");
const filter = document.getElementById("filter");
let tiles = ""; // id and version of the run that the tiles show
const rows = new Map(); // elements of listed runs; they are reused, so that a click never hits a replaced element

export function setUpSide() {
  filter.addEventListener("input", changed);
  const choose = (ids) => { store.shown = new Set(ids); store.touched = true; changed(); };
  document.getElementById("all").addEventListener("click", () => choose(listed().map((run) => run.id)));
  document.getElementById("none").addEventListener("click", () => choose([]));
  const turn = (by) => ask(`/api/page/${Math.max(0, store.page.first + by * store.page.size)}`, { method: "POST" });
  document.getElementById("newer").addEventListener("click", () => turn(-1));
  document.getElementById("older").addEventListener("click", () => turn(1));
}

function listed() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  return [...store.runs.values()].filter((run) => run.name && words.every((word) => `${run.name} ${run.status}`.toLowerCase().includes(word)));
}

export function drawSide() {
  const { first, total, size } = store.page;
  document.getElementById("pages").hidden = total <= size;
  document.getElementById("newer").disabled = first === 0;
  document.getElementById("older").disabled = first + size >= total;
  put(document.getElementById("page"), `${whole(first + 1)} to ${whole(Math.min(total, first + size))} of ${whole(total)}`);
  const runs = listed();
  for (const [id, row] of rows) {
    if (store.runs.has(id)) continue;
    row.element.remove();
    rows.delete(id);
  }
  const elements = runs.map((run) => rowOf(run));
  if (!elements.length) elements.push(h("li", { class: "empty" }, store.runs.size ? "No run matches the filter." : "There are no runs yet. A run appears here when it begins."));
  if (elements.length !== list.children.length || elements.some((element, i) => list.children[i] !== element)) list.replaceChildren(...elements);
}

function rowOf(run) {
  const row = rows.get(run.id) ?? newRow(run);
  const drawn = [run.told, run.number, store.shown.has(run.id), run.id === store.current, isDark()].join();
  if (drawn === row.drawn) return row.element;
  row.drawn = drawn;
  const { used, left } = budget(run);
  row.element.classList.toggle("current", run.id === store.current);
  row.element.style.setProperty("--colour", colour(run.number));
  row.box.checked = store.shown.has(run.id);
  put(row.name, run.name);
  put(row.score, run.val_bpb != null ? fixed(run.val_bpb, 4) : "");
  put(row.status, run.status + (run.stop_reason ? ` (${run.stop_reason})` : ""));
  row.status.className = `status ${run.status}`;
  const rest = run.status === "running" && left ? `${left} left` : run.loss != null ? `loss ${fixed(run.loss, 3)}` : "";
  put(row.about, [run.step != null ? `step ${whole(run.step)}` : "", rest].filter(Boolean).join(", "));
  row.bar.hidden = used === null || run.status !== "running";
  row.bar.style.setProperty("--used", used ?? 0);
  return row.element;
}

function newRow(run) {
  const box = h("input", { type: "checkbox", "aria-label": `Show ${run.name}` });
  box.addEventListener("change", () => {
    box.checked ? store.shown.add(run.id) : store.shown.delete(run.id);
    store.touched = true;
    changed();
  });
  const [name, score, status, about] = ["span", "b", "span", "span"].map((tag, i) => h(tag, { class: ["name", "score", "status", "about"][i] }));
  const bar = h("div", { class: "bar" });
  const only = h("button", { type: "button", class: "only", title: "Show this run alone", onclick: (event) => {
    event.stopPropagation();
    store.shown = new Set([run.id]);
    store.current = run.id;
    store.touched = true;
    changed();
  } }, "only");
  const text = h("button", { type: "button", class: "text", onclick: () => { store.current = run.id; changed(); } }, h("span", { class: "line" }, name, score), h("span", { class: "line small" }, status, about));
  const element = h("li", {}, box, text, only, bar);
  const row = { element, box, name, score, status, about, bar };
  rows.set(run.id, row);
  return row;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function drawTiles() {
  const host = document.getElementById("tiles");
  const run = store.runs.get(store.current);
  host.hidden = !run?.name;
  if (host.hidden || tiles === `${run.id} ${run.told}`) return;
  tiles = `${run.id} ${run.told}`;
  const { used, left } = budget(run);
  const speed = run.status === "running" ? run.tokens_per_second : run.result?.tokens_per_second ?? run.tokens_per_second;
  const tile = (name, value, more) => (value ? h("div", { class: "tile" }, h("small", {}, name), h("b", {}, value), more ? h("small", {}, more) : null) : null);
  const bytes = run.result?.artifact_bytes;
  host.replaceChildren(...[
    h("div", { class: "tile wide" }, h("small", { class: `status ${run.status}` }, run.status + (run.stop_reason ? ` (${run.stop_reason})` : "")), h("b", { title: run.path }, run.name),
      run.error ? h("small", { class: "error" }, run.error) : h("small", {}, `${run.path}`)),
    tile("step", whole(run.step), run.max_steps ? `of ${whole(run.max_steps)}` : ""),
    tile("loss", fixed(run.loss), "nats per token"),
    tile("bits per byte", fixed(run.val_bpb), "validation"),
    tile("tokens", short(run.tokens), speed ? `${short(speed)} per second` : ""),
    tile("trained", duration(run.elapsed_seconds), run.budget_seconds ? `of ${duration(run.budget_seconds)}` : ""),
    run.status === "running" && left ? tile("left", left, used !== null ? `${(100 * used).toFixed(0)}% of the budget used` : "") : null,
    bytes ? tile("artifact bytes", whole(bytes), run.result.artifact_bpb != null ? `${fixed(run.result.artifact_bpb)} bits per byte` : "") : null,
    run.slowest_rank ? tile("slowest rank", `rank ${run.slowest_rank[0]}`, `${short(1000 * run.slowest_rank[1], 3)} ms per step, median ${short(1000 * run.slowest_rank[2], 3)} ms`) : null,
    run.damaged ? tile("damaged lines", whole(run.damaged), "skipped in metrics.jsonl") : null,
    run.status === "running" ? h("button", { type: "button", class: "stop", onclick: () => stop(run) }, "Stop") : null,
  ].filter(Boolean));
}

function stop(run) {
  const dialog = document.getElementById("stopping");
  const token = document.getElementById("token");
  const said = document.getElementById("stopped");
  said.textContent = `${run.name} will save and stop; the command it was started with resumes it.`;
  token.value = sessionStorage.getItem("token") ?? "";
  dialog.onclose = async () => {
    if (dialog.returnValue !== "yes") return;
    try {
      await ask(`/api/runs/${run.id}/stop`, { method: "POST", headers: { Authorization: `Bearer ${token.value.trim()}` } });
      sessionStorage.setItem("token", token.value.trim());
    } catch (error) {
      said.textContent = `Not stopped: ${error.message}.`;
      dialog.showModal();
    }
  };
  dialog.returnValue = "";
  dialog.showModal();
}
