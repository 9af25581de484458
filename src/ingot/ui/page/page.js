// The page: switches tabs and redraws what has changed.
import { changed, connect, isDark, onChange, store, h, AXES } from "./store.js";
import { Chart, view } from "./charts.js";
import { drawSide, drawTiles, setUpSide } from "./side.js";
import { compareTab, samplesTab } from "./views.js";
import { playTab } from "./play.js";
import { speedTab } from "./speed.js";

const CURVES = [
  { id: "loss", title: "training loss", unit: "nats per token", kind: "train", name: "loss" },
  { id: "bpb", title: "validation", unit: "bits per byte", kind: "evaluation", name: "val_bpb" },
  { id: "tokens", title: "tokens per second", unit: "", kind: "train", name: "tokens_per_second" },
  { id: "norm", title: "gradient norm", unit: "before clipping", kind: "train", name: "grad_norm" },
  { id: "rate", title: "learning rate", unit: "of matrices", kind: "train", name: "learning_rate" },
];

function curvesTab() {
  const charts = CURVES.map((spec) => new Chart(spec));
  const empty = h("p", { class: "empty" });
  const back = h("button", { type: "button", onclick: () => { view.range = null; changed(); } }, "whole axis");
  const element = h("div", {}, h("div", { class: "controls" }, axisChoice(), check("logX", "log x"), check("logY", "log y"), check("seeds", "seeds as a band"),
    check("whole", "whole height"), smoothChoice(), back), h("div", { class: "charts" }, charts.map((chart) => chart.element)), empty);
  return {
    element,
    draw() {
      const drawn = charts.map((chart) => chart.draw()).some(Boolean);
      back.hidden = !view.range;
      empty.hidden = drawn;
      empty.textContent = whyEmpty();
      document.body.dataset.drawn = charts[0].curves;
    },
  };
}

function whyEmpty() {
  if (!store.runs.size) return "There are no runs in these folders yet. A run appears here when it begins; this command starts one: ingot train --recipe demo";
  if (!store.shown.size) return "No run is selected; tick a run in the list.";
  if (view.axis === "flops") return "These runs do not record how many FLOPs a token takes; runs of this version do.";
  if (view.axis === "artifact_bytes") return "None of these runs has written an artifact yet.";
  return "These runs have not logged a step yet.";
}

function axisChoice() {
  const options = Object.entries(AXES).map(([value, words]) => h("option", { value }, words));
  return h("label", {}, "against ", h("select", { id: "axis", onchange: (event) => { view.axis = event.target.value; view.range = null; changed(); } }, options));
}

function smoothChoice() {
  const options = [[0, "none"], [0.8, "a little"], [0.95, "more"], [0.99, "much"]].map(([value, words]) => h("option", { value }, words));
  return h("label", {}, "smoothing ", h("select", { onchange: (event) => { view.smooth = Number(event.target.value); changed(); } }, options));
}

function check(name, words) {
  return h("label", {}, h("input", { type: "checkbox", checked: view[name], onchange: (event) => { view[name] = event.target.checked; changed(); } }), ` ${words}`);
}

const TABS = { curves: curvesTab, compare: compareTab, samples: samplesTab, speed: speedTab, playground: playTab };
const made = {};
let open = null;

function openTab(name) {
  open = name in TABS ? name : "curves";
  made[open] ??= TABS[open]();
  document.getElementById("tab").replaceChildren(made[open].element);
  for (const button of document.getElementById("tabs").children) button.setAttribute("aria-selected", button.dataset.tab === open);
  if (location.hash.slice(1) !== open) history.replaceState(null, "", `#${open}`);
  changed();
}

function drawHeader() {
  const runs = [...store.runs.values()];
  const running = runs.filter((run) => run.status === "running").length;
  const reading = runs.filter((run) => run.loaded === false).length;
  const unreadable = runs.filter((run) => run.status === "unreadable").length;
  document.getElementById("summary").textContent = `${runs.length} ${runs.length === 1 ? "run" : "runs"}${running ? `, ${running} running` : ""}${unreadable ? `, ${unreadable} unreadable` : ""}${reading ? `, ${reading} being read` : ""}`;
  const live = document.getElementById("live");
  live.textContent = store.connected ? "live" : "not connected";
  live.classList.toggle("on", store.connected);
  document.title = running ? `(${running}) ingot` : "ingot";
}

function setUpTheme() {
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
  const button = document.getElementById("theme");
  const name = () => { button.textContent = isDark() ? "light" : "dark"; };
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("theme", next);
    name();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); changed(); });
  name();
}

setUpTheme();
setUpSide();
document.getElementById("tabs").append(...Object.keys(TABS).map((name) => h("button", { type: "button", role: "tab", "data-tab": name, onclick: () => openTab(name) }, name)));
onChange(() => { drawHeader(); drawSide(); drawTiles(); made[open]?.draw(); });
openTab(location.hash.slice(1));
connect();
