// Tabs of tables and texts: results, settings that differ, statistics over seeds, and samples.
import { ask, changed, colour, duration, fixed, h, shownRuns, short, store, whole } from "./store.js";

const MOST_SAMPLES = 4; // runs whose samples are shown side by side
const MOST_COMPARED = 12; // maximum number of runs in the table of settings

export function table(head, rows) {
  const cell = (tag, value) => h(tag, {}, value instanceof Node ? value : String(value ?? ""));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, head.map((one) => cell("th", one)))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((one) => cell("td", one)))))));
}

function named(run) {
  return h("span", { class: "named" }, h("i", { class: "swatch", colour: colour(run.number) }), run.name);
}

export function compareTab() {
  const [results, settings, seeds] = [h("section"), h("section"), h("section")];
  const element = h("div", {}, results, settings, seeds);
  let asked = "", waits = false; // true during a request: only one at a time, later changes are requested after it
  return {
    element,
    draw() {
      const runs = shownRuns().filter((run) => run.name);
      results.replaceChildren(h("h2", {}, "Results"), table(["run", "status", "steps", "tokens", "trained", "loss", "bits per byte", "artifact bytes", "artifact bits per byte", "seed"], runs.map((run) => [
        named(run), run.status, whole(run.step), short(run.tokens), duration(run.elapsed_seconds), fixed(run.loss), fixed(run.val_bpb), whole(run.result.artifact_bytes), fixed(run.result.artifact_bpb), run.seed])));
      const key = runs.map((run) => `${run.id} ${run.arm} ${run.status} ${run.val_bpb}`).join();
      if (waits || key === asked) return;
      [asked, waits] = [key, true];
      fill(settings, "Settings", runs, settingsOf).then(() => fill(seeds, "Over seeds", runs, seedsOf)).finally(() => {
        waits = false;
        changed();
      });
    },
  };
}

async function fill(host, title, runs, found) {
  const known = runs.filter((run) => run.arm);
  const children = known.length ? await found(known).catch((error) => [h("p", { class: "error" }, error.message)]) : [];
  host.replaceChildren(...(children.length ? [h("h2", {}, title), ...children] : []));
}

async function settingsOf(runs) {
  const asked = runs.slice(0, MOST_COMPARED);
  const told = await ask(`/api/settings?runs=${asked.map((run) => run.id)}`);
  const note = runs.length > asked.length ? ` Only the first ${asked.length} of ${runs.length} runs are compared.` : "";
  const words = asked.length > 1 ? (told.rows.length ? "Settings that differ between the runs." : "The runs do not differ in settings that affect training.") : "Settings that differ from the defaults.";
  const columns = told.runs.map((id) => named(store.runs.get(id)));
  return [h("p", { class: "note" }, words + note), told.rows.length ? table(["setting", ...columns], told.rows) : null].filter(Boolean);
}

async function seedsOf(runs) {
  const { arms, tests } = await ask(`/api/statistics?runs=${runs.map((run) => run.id)}`);
  if (!arms.length) return [];
  const found = [h("p", { class: "note" }, "Groups of runs that differ only in their seeds."), table(["runs", "n", "mean bits per byte", "std"], arms.map((arm) => [arm.runs, arm.n, fixed(arm.mean, 5), fixed(arm.std, 5)]))];
  if (tests.length) found.push(table(["A", "B", "B against A"], tests.map((test) => [test.a, test.b, test.said])));
  return found;
}

export function samplesTab() {
  const element = h("div", { class: "samples" });
  const cards = new Map();
  return {
    element,
    draw() {
      const runs = shownRuns().filter((run) => run.samples?.length).slice(0, MOST_SAMPLES);
      if (!runs.length) {
        element.replaceChildren(h("p", { class: "empty" }, "None of the selected runs has written a sample; train with --evaluation.sample_tokens 400."));
        return;
      }
      const wanted = runs.map((run) => {
        if (!cards.has(run.id)) cards.set(run.id, sampleCard(run));
        cards.get(run.id).draw();
        return cards.get(run.id).element;
      });
      if (wanted.length !== element.children.length || wanted.some((one, i) => element.children[i] !== one)) element.replaceChildren(...wanted);
    },
  };
}

// The samples of one run; it follows the newest until the user selects an older one.
function sampleCard(run) {
  const slider = h("input", { type: "range", min: 0, "aria-label": `Step of the sample of ${run.name}` });
  const title = h("span");
  const text = h("pre");
  let follows = true, shown = null;
  const show = async () => {
    const step = store.runs.get(run.id)?.samples[Number(slider.value)];
    if (step == null || step === shown) return;
    shown = step;
    title.textContent = `step ${whole(step)}`;
    try {
      const told = await ask(`/api/runs/${run.id}/samples/${step}`);
      if (shown === step) text.textContent = told.text;
    } catch (error) {
      text.textContent = error.message;
    }
  };
  slider.addEventListener("input", () => { follows = slider.value === slider.max; show(); });
  return {
    element: h("article", {}, h("h3", {}, named(run), " ", title), slider, text),
    draw() {
      const last = (store.runs.get(run.id)?.samples.length ?? 1) - 1;
      slider.max = last;
      slider.hidden = !last;
      if (follows) slider.value = last;
      show();
    },
  };
}
