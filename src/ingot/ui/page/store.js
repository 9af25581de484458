// The state of the page: the server's events update it, and everything that is drawn reads it.

export const AXES = {
  step: "steps", tokens: "tokens", elapsed_seconds: "seconds of training", flops: "FLOPs", artifact_bytes: "artifact bytes",
};
const MOST_BINS = 768;

export const store = {
  runs: new Map(), // by id, newest first: the facts of each run and its columns
  page: { first: 0, total: 0, size: 0 }, // the slice of the list of runs that the server sends
  connected: false,
  shown: new Set(), // ids of the selected runs
  current: null, // id of the run whose metrics are shown above the charts
  touched: false, // the user has selected runs, so new ones are not selected automatically
};

const listeners = [];
let due = false;

export function onChange(listener) {
  listeners.push(listener);
}

// Messages arrive in batches; redraw once per frame.
export function changed() {
  if (due) return;
  due = true;
  const draw = () => {
    due = false;
    for (const listener of listeners) listener();
  };
  document.hidden ? setTimeout(draw, 500) : requestAnimationFrame(draw);
}

export function connect() {
  const source = new EventSource("/api/events");
  source.onopen = () => { store.connected = true; changed(); };
  source.onerror = () => { store.connected = false; changed(); };
  source.onmessage = (event) => {
    for (const message of JSON.parse(event.data)) take[message.type]?.(message);
    changed();
  };
}

const take = {
  runs({ ids, first, total, page }) {
    store.page = { first, total, size: page };
    const known = store.runs;
    store.runs = new Map(ids.map((id) => [id, known.get(id) ?? empty(id)]));
    for (const id of ids) if (!known.has(id) && !store.touched) store.shown.add(id);
    for (const id of store.shown) if (!store.runs.has(id)) store.shown.delete(id);
    if (!store.runs.has(store.current)) store.current = ids[0] ?? null;
  },
  run({ type, id, ...facts }) {
    const run = store.runs.get(id);
    if (!run) return;
    const renamed = run.name !== facts.name;
    Object.assign(run, facts);
    run.told++;
    if (renamed) number();
  },
  bins({ id, kind, from, columns }) {
    const bins = store.runs.get(id)?.[kind];
    if (!bins) return;
    let used = from;
    bins.told++;
    if (!from) bins.known.clear();
    for (const [name, packed] of Object.entries(columns)) {
      const values = decode(packed);
      if (values.some(Number.isFinite)) bins.known.add(name);
      bins.columns[name] ??= new Float32Array(MOST_BINS).fill(NaN);
      bins.columns[name].set(values, from);
      used = from + values.length;
    }
    // Bins of a single line have no minimum and maximum columns.
    for (const name of Object.keys(bins.columns)) if (!(name in columns)) delete bins.columns[name];
    bins.used = used;
  },
};

// Colours are assigned in the order of names, which does not change while runs progress.
function number() {
  const named = [...store.runs.values()].filter((run) => run.name);
  named.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true })).forEach((run, i) => { run.number = i; });
}

// `told` counts updates; an element is redrawn only if the count has changed.
function empty(id) {
  const bins = () => ({ told: 0, used: 0, columns: {}, known: new Set() }); // known: columns with at least one number
  return { id, told: 0, number: 0, train: bins(), evaluation: bins(), samples: [], stalls: [], percentiles: {}, result: {} };
}

function decode(packed) {
  const text = atob(packed);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}

export function shownRuns() {
  return [...store.runs.values()].filter((run) => store.shown.has(run.id));
}

// A column of a run over an axis: x, y and, for bins of several lines, minimum and maximum; null if there is none.
export function curve(run, kind, name, axis) {
  if (axis === "artifact_bytes") return artifactPoint(run, name);
  const { used, columns, known } = run[kind];
  const along = axis === "flops" ? "tokens" : axis;
  if (!used || !known.has(name) || !known.has(along) || (axis === "flops" && !run.flops_per_token)) return null;
  let x = columns[along].subarray(0, used);
  if (!isFinite(x[0]) || !isFinite(x[used - 1])) return null; // one damaged run must not break the axis of all others
  if (axis === "flops") x = Float64Array.from(x, (tokens) => tokens * run.flops_per_token);
  const part = (ending) => columns[name + ending]?.subarray(0, used) ?? null;
  return { x, y: part(""), low: part("_low"), high: part("_high") };
}

function artifactPoint(run, name) {
  const bytes = run.result?.artifact_bytes;
  const value = { loss: run.result?.final_loss, val_bpb: run.result?.artifact_bpb, val_loss: run.result?.val_loss }[name];
  return bytes && value != null ? { x: [bytes], y: [value], low: null, high: null } : null;
}

const PALETTE = [[211, 78, 52], [27, 88, 50], [152, 55, 42], [340, 70, 55], [265, 60, 62], [190, 75, 40], [45, 90, 45], [0, 65, 52]];

export function colour(number, alpha = 1) {
  const [hue, saturation, light] = PALETTE[number] ?? [(number * 137.5) % 360, 62, 50];
  const lighter = isDark() ? 12 : 0;
  return `hsl(${hue} ${saturation}% ${light + lighter}% / ${alpha})`;
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : prefersDark.matches;
}

// Create an element with properties and children; text is never parsed as HTML.
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "colour") element.style.setProperty("--colour", value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

export async function ask(path, options) {
  const answer = await fetch(path, options);
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error?.message ?? `the server answered ${answer.status}`);
  return told;
}

export const whole = (value) => (value == null || !Number.isFinite(value) ? "" : Math.round(value).toLocaleString("en"));
export const fixed = (value, digits = 4) => (value == null || !Number.isFinite(value) ? "" : value.toFixed(digits));

export function short(value, digits = 4) {
  if (value == null || !Number.isFinite(value)) return "";
  const size = Math.abs(value);
  for (const [unit, name] of [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${Number((value / (name === "k" ? 1e3 : unit)).toPrecision(digits))}${name}`;
  }
  return Number.isInteger(value) || (size >= 100 && digits === 4) ? whole(value) : String(Number(value.toPrecision(digits)));
}

export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "";
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 6000 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// The used fraction of a run's budget, and the remaining budget as text.
export function budget(run) {
  const bySteps = run.max_steps ? run.step / run.max_steps : -1;
  const bySeconds = run.budget_seconds ? run.elapsed_seconds / run.budget_seconds : -1;
  const used = Math.min(1, Math.max(bySteps, bySeconds));
  if (used < 0) return { used: null, left: "" };
  if (bySteps >= bySeconds) {
    const time = run.step && run.elapsed_seconds ? `, ${duration((run.elapsed_seconds / run.step) * run.steps_left)}` : "";
    return { used, left: `${whole(run.steps_left)} steps${time}` };
  }
  return { used, left: duration(run.budget_seconds_left) };
}
