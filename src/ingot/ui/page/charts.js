// uPlot charts: curves of runs over one axis, with seeds as bands. All charts share the cursor and the zoom.
/* global uPlot */
import { AXES, colour, curve, changed, fixed, h, isDark, short, shownRuns } from "./store.js";

export const view = { axis: "step", logX: false, logY: false, seeds: true, smooth: 0, whole: false, range: null };

const GRID = 700; // x positions at which curves are resampled if they have many points in total
const FEW_POINTS = 1500; // up to this many points in total, every x value of the data is a grid position
const MARKED = 40; // curves with at most this many points are drawn with a dot at each
const BANDED = 4; // charts with at most this many lines show the minimum and maximum of each bin
const BEGINNING = 0.02; // fraction of the x axis ignored when scaling y: the loss starts far above its later values
const NEAREST = 8; // curves listed in the tooltip
const HEIGHT = 260;

export class Chart {
  constructor(spec) {
    this.spec = spec;
    this.plot = null;
    this.curves = 0; // number of curves to draw
    this.lines = []; // lines that were last drawn
    this.signature = this.drawn = ""; // keys of the plot's lines and of the data last drawn
    this.visible = true; // in or near the viewport
    this.tip = h("div", { class: "tip", hidden: true });
    this.body = h("div", { class: "plot" });
    this.note = h("span", { class: "unit" }, spec.unit);
    this.element = h("figure", { class: "chart", id: `chart-${spec.id}` }, h("figcaption", {}, spec.title, " ", this.note), this.body);
    new ResizeObserver(() => this.fit()).observe(this.body);
    const watch = new IntersectionObserver((entries) => {
      this.visible = entries[entries.length - 1].isIntersecting;
      if (this.visible) this.draw();
    }, { rootMargin: "200px" });
    watch.observe(this.element);
  }

  // Draw the selected runs if something has changed and the chart is visible; return true if there is anything to draw.
  draw() {
    const from = sourceOf(this.spec);
    if (from === this.drawn) return this.curves > 0;
    const lines = linesOf(this.spec);
    this.curves = lines.reduce((sum, line) => sum + line.curves.length, 0);
    this.element.hidden = !lines.length;
    this.drawn = this.visible ? from : "";
    if (!lines.length || !this.visible) return this.curves > 0;
    this.lines = lines;
    const grid = gridOf(this.lines);
    for (const line of this.lines) line.values = sampled(line, grid);
    this.x = [grid[0], grid[grid.length - 1]];
    this.y = heightOf(this.lines, grid, !view.whole && !view.logX && !view.range && grid.length > MARKED);
    const banded = this.lines.length <= BANDED || this.lines.some((line) => line.curves.length > 1);
    const data = [grid];
    for (const line of this.lines) {
      data.push(line.values.y);
      line.banded = banded && line.values.low !== null;
      if (line.banded) data.push(line.values.high, line.values.low);
    }
    const signature = JSON.stringify([view.axis, view.logX, view.logY, isDark(), this.lines.map((line) => [line.name, line.number, line.banded])]);
    if (this.plot && signature === this.signature) {
      this.plot.setData(data);
    } else {
      this.plot?.destroy();
      this.signature = signature;
      this.plot = new uPlot(this.options(), data, this.body);
      this.plot.over.append(this.tip);
    }
    this.element.dataset.lines = this.lines.length;
    this.element.dataset.last = grid[grid.length - 1];
    return true;
  }

  fit() {
    if (this.plot && this.body.clientWidth) this.plot.setSize({ width: this.body.clientWidth, height: HEIGHT });
  }

  options() {
    const style = getComputedStyle(document.documentElement);
    const [ink, rule] = [style.getPropertyValue("--muted"), style.getPropertyValue("--rule")];
    const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const points = view.axis === "artifact_bytes";
    return {
      width: this.body.clientWidth || 600,
      height: HEIGHT,
      legend: { show: false },
      focus: { alpha: 0.25 },
      cursor: {
        sync: { key: "ingot", scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        focus: { prox: 20 },
        points: { size: 6 },
        bind: { dblclick: () => () => { view.range = null; changed(); return null; } },
      },
      scales: {
        x: { time: false, distr: view.logX && !points ? 3 : 1, range: () => this.width(points) },
        y: { distr: view.logY ? 3 : 1, range: () => this.y },
      },
      axes: [
        { ...axis, values: (_, ticks) => labels(ticks), space: 70, size: 30 },
        { ...axis, values: (_, ticks) => labels(ticks), size: 58, space: 34 },
      ],
      series: [{}, ...this.lines.flatMap((line, i) => this.series(line, i, points))],
      bands: this.bands(),
      hooks: {
        setSelect: [(plot) => this.zoom(plot)],
        setCursor: [(plot) => this.point(plot)],
      },
    };
  }

  series(line, i, points) {
    const found = [{
      label: line.name,
      stroke: colour(line.number),
      width: this.lines.length > 12 ? 1.2 : 1.8,
      paths: points ? () => null : undefined,
      points: { show: true, size: points ? 9 : 5, fill: colour(line.number), filter: () => this.lines[i].own },
    }];
    const edge = { label: line.name, stroke: "transparent", width: 0, points: { show: false } };
    if (line.banded) found.push(edge, edge);
    return found;
  }

  bands() {
    const found = [];
    let at = 1;
    for (const line of this.lines) {
      if (line.banded) found.push({ series: [at + 1, at + 2], fill: colour(line.number, line.curves.length > 1 ? 0.22 : 0.14) });
      at += line.banded ? 3 : 1;
    }
    return found;
  }

  width(points) {
    const [low, high] = this.x;
    if (view.logX && !points) return [Math.max(low, high * 1e-6, 1e-9), high];
    const room = low === high ? Math.abs(low) * 0.1 || 1 : points ? (high - low) * 0.08 : 0;
    return [low - room, high + room];
  }

  zoom(plot) {
    const { left, width } = plot.select;
    if (width < 5) return;
    view.range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    changed();
  }

  // The tooltip: values of the curves nearest to the cursor.
  point(plot) {
    const { idx, left, top } = plot.cursor;
    this.tip.hidden = idx == null || left < 0 || !plot.over.matches(":hover"); // the other charts show only the cursor
    if (this.tip.hidden) return;
    const there = plot.posToVal(Math.max(0, top), "y");
    const known = this.lines.map((line) => ({ line, value: line.values.y[idx], low: line.values.low?.[idx], high: line.values.high?.[idx] }));
    const near = known.filter((one) => one.value != null).sort((a, b) => Math.abs(a.value - there) - Math.abs(b.value - there));
    const rows = near.slice(0, NEAREST).sort((a, b) => b.value - a.value).map(({ line, value, low, high }) => h(
      "div", { class: "row" }, h("i", { class: "swatch", colour: colour(line.number) }), h("span", {}, line.name),
      h("b", {}, short5(value)), line.curves.length > 1 && h("small", {}, `${short5(low)} to ${short5(high)}`),
    ));
    this.tip.replaceChildren(h("div", { class: "where" }, `${short(plot.data[0][idx])} ${AXES[view.axis]}`), ...rows);
    const onRight = left > plot.over.clientWidth / 2;
    this.tip.style.left = onRight ? "" : `${left + 14}px`;
    this.tip.style.right = onRight ? `${plot.over.clientWidth - left + 14}px` : "";
    this.tip.style.top = `${Math.min(top + 10, HEIGHT / 2)}px`;
  }
}

// Axis labels, with enough digits to tell them apart.
function labels(ticks) {
  for (let digits = 4; ; digits++) {
    const found = ticks.map((tick) => (tick == null ? "" : short(tick, digits)));
    const told = found.filter(Boolean);
    if (digits === 9 || new Set(told).size === told.length) return found;
  }
}

const short5 = (value) => (Math.abs(value) >= 1000 || (value && Math.abs(value) < 0.01) ? short(value) : fixed(value, 4));

// A key of everything that a chart depends on; it is redrawn only if the key changes.
function sourceOf({ kind }) {
  const runs = shownRuns().map((run) => [run.id, run[kind].told, run.name, run.number, run.arm, run.flops_per_token, view.axis === "artifact_bytes" && run.told]);
  return JSON.stringify([view, isDark(), runs]);
}

// The lines of a chart: one per run, or one per group of runs that differ only in their seeds.
function linesOf({ kind, name }) {
  const groups = new Map();
  for (const run of shownRuns()) {
    const found = curve(run, kind, name, view.axis);
    if (!found) continue;
    const key = view.seeds && run.arm && view.axis !== "artifact_bytes" ? run.arm : run.id;
    const group = groups.get(key) ?? { name: run.name, number: run.number, curves: [] };
    group.curves.push(found);
    group.number = Math.min(group.number, run.number);
    groups.set(key, group);
  }
  for (const group of groups.values()) if (group.curves.length > 1) group.name += ` and ${group.curves.length - 1} more seeds`;
  return [...groups.values()];
}

// An exponential moving average with bias correction.
function smoothed(values) {
  const keep = view.smooth;
  if (!keep) return values;
  const found = new Float64Array(values.length);
  let sum = 0, weight = 0;
  for (let i = 0; i < values.length; i++) {
    if (isFinite(values[i])) {
      sum = keep * sum + (1 - keep) * values[i];
      weight = keep * weight + (1 - keep);
    }
    found[i] = weight ? sum / weight : NaN;
  }
  return found;
}

// The x positions shared by all lines.
function gridOf(lines) {
  const curves = lines.flatMap((line) => line.curves);
  const count = curves.reduce((sum, one) => sum + one.x.length, 0);
  let low = Math.min(...curves.map((one) => one.x[0]));
  let high = Math.max(...curves.map((one) => one.x[one.x.length - 1]));
  if (view.range && view.axis !== "artifact_bytes") [low, high] = view.range;
  if (count <= FEW_POINTS) {
    const inside = curves.flatMap((one) => Array.from(one.x).filter((x) => x >= low && x <= high));
    const found = Float64Array.from(new Set([...inside, low, high])).sort();
    if (found.length > 1 || high === low) return found;
  }
  const logarithmic = view.logX && high > 0;
  const first = logarithmic ? Math.log(Math.max(low, high * 1e-6)) : low;
  const last = logarithmic ? Math.log(high) : high;
  return Float64Array.from({ length: GRID }, (_, i) => {
    const place = first + ((last - first) * i) / (GRID - 1);
    return logarithmic ? Math.exp(place) : place;
  });
}

// A line sampled on the grid: the mean of its curves, and the minimum and maximum of the curves or of their bins.
function sampled(line, grid) {
  line.own = [];
  if (line.curves.every((one) => one.x.length <= MARKED)) {
    const own = new Set(line.curves.flatMap((one) => Array.from(one.x)));
    if (own.size <= MARKED) grid.forEach((x, i) => { if (own.has(x)) line.own.push(i); });
  }
  if (line.curves.length === 1) {
    const [{ x, y, low, high }] = line.curves;
    return { y: gaps(at(x, smoothed(y), grid)), low: low && gaps(at(x, low, grid)), high: high && gaps(at(x, high, grid)) };
  }
  const [sum, count, low, high] = [0, 0, Infinity, -Infinity].map((value) => new Float64Array(grid.length).fill(value));
  for (const { x, y } of line.curves) {
    const values = at(x, smoothed(y), grid);
    for (let i = 0; i < values.length; i++) {
      const value = values[i];
      if (value !== value) continue; // no value at this position
      sum[i] += value;
      count[i]++;
      if (value < low[i]) low[i] = value;
      if (value > high[i]) high[i] = value;
    }
  }
  return { y: gaps(sum.map((value, i) => value / count[i])), low: gaps(low), high: gaps(high) };
}

// uPlot expects null for missing values.
const gaps = (values) => Array.from(values, (value) => (isFinite(value) ? value : null));

// Linear interpolation of a curve; NaN before its first point, after its last, and for values <= 0 on a log axis.
function at(x, y, grid) {
  const found = new Float64Array(grid.length).fill(NaN);
  const last = x.length - 1;
  let k = 0;
  for (let i = 0; i < grid.length; i++) {
    const place = grid[i];
    while (k < last && x[k + 1] <= place) k++;
    if (place < x[0] || place > x[last]) continue;
    const share = k < last && x[k + 1] > x[k] ? (place - x[k]) / (x[k + 1] - x[k]) : 0;
    const value = share && isFinite(y[k + 1]) ? y[k] + share * (y[k + 1] - y[k]) : y[k];
    if (!view.logY || value > 0) found[i] = value;
  }
  return found;
}

function heightOf(lines, grid, tailOnly) {
  const [first, last] = [grid[0], grid[grid.length - 1]];
  const skip = tailOnly ? first + BEGINNING * (last - first) : -Infinity;
  let low = Infinity, high = -Infinity;
  for (const { values } of lines) {
    for (let i = 0; i < grid.length; i++) {
      if (values.y[i] == null || grid[i] < skip) continue;
      low = Math.min(low, values.low?.[i] ?? values.y[i]);
      high = Math.max(high, values.high?.[i] ?? values.y[i]);
    }
  }
  if (low > high) return tailOnly ? heightOf(lines, grid, false) : [0, 1];
  if (view.logY) return [low / 1.05, high * 1.05];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}
