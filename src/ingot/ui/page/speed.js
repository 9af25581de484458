// Step times: percentiles, stalls, and the slowest step of every bin.
import { Chart } from "./charts.js";
import { duration, fixed, h, short, shownRuns, whole } from "./store.js";
import { table } from "./views.js";

export function speedTab() {
  const charts = [
    new Chart({ id: "slowest", title: "slowest step of each stretch", unit: "seconds", kind: "train", name: "step_seconds_high" }),
    new Chart({ id: "speed", title: "tokens per second", unit: "", kind: "train", name: "tokens_per_second" }),
  ];
  const host = h("div");
  const element = h("div", {}, h("div", { class: "charts" }, charts.map((chart) => chart.element)), host);
  return {
    element,
    draw() {
      for (const chart of charts) chart.draw();
      const rows = shownRuns().filter((run) => run.percentiles?.p50).map((run) => [run.name, ...["p50", "p95", "p99"].map((name) => seconds(run.percentiles[name])), short(run.tokens_per_second), stalls(run)]);
      host.replaceChildren(h("p", { class: "note" }, "Seconds per step. Stalls are logging intervals with a mean over three times the median; evaluations and saves are not counted."),
        table(["run", "median", "p95", "p99", "tokens/s", "longest stalls"], rows));
    },
  };
}

const seconds = (value) => (value < 0.1 ? `${fixed(value * 1000, 2)} ms` : `${fixed(value, 3)} s`);

function stalls(run) {
  return run.stalls.slice(0, 5).map(([step, lost]) => `${duration(lost)} lost up to step ${whole(step)}`).join(", ") || "none";
}
