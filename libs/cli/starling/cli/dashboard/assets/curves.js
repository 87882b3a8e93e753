// Curves of all shown runs over each other: metrics of steps, evaluations, any further metric, staleness over the steps.

import { card, choice, clock, h, replace, s } from "./dom.js";
import { get } from "./api.js";
import { later, never } from "./frames.js";
import { LineChart } from "./chart.js";

const REFRESH_MS = 3000;
const CATALOG_MS = 30000;
const [FEWEST, MOST] = [120, 480]; // columns of a plot: about one for two pixels

/** Return, by metric, the series of the runs. `wanted` are pairs of a metric and `step` or `evaluation`. Of a run that has not
 *  changed since, `kept` has the answer, whose arrays are then the same ones. */
export async function fetchCurves(page, wanted, options, ids = [...page.shown], kept = new Map()) {
  const found = new Map();
  const answerOf = async (id, of, names) => {
    const [key, question] = [`${id} ${of}`, JSON.stringify([names, options])];
    const [before, state] = [kept.get(key), page.states.get(id)];
    if (before?.question === question && before.answer.revision === state?.revision.curves && before.attempt === state.attempt) return before.answer;
    const answer = await get(`runs/${id}/series`, { names: JSON.stringify(names), of, columns: MOST, ...options }).catch(() => null);
    if (answer) kept.set(key, { question, answer, attempt: state?.attempt });
    return answer;
  };
  const ask = async (id, of) => {
    const names = wanted.filter((one) => one[1] === of).map((one) => one[0]);
    if (!names.length) return;
    const answer = await answerOf(id, of, names);
    for (const [name, [x, low, mean, high]] of Object.entries(answer?.series ?? {})) {
      if (!found.has(name)) found.set(name, []);
      found.get(name).push({ name: page.runs[id].name, id, colour: id % 8, x, low, mean, high, plain: of === "evaluation" });
    }
  };
  await Promise.all(ids.flatMap((id) => [ask(id, "step"), ask(id, "evaluation")]));
  for (const series of found.values()) series.sort((one, two) => one.id - two.id);
  return found;
}

export function curves(main, page) {
  const view = { x: "steps", window: 12, log: false, range: null };
  const plots = page.plots.map((plot) => ({ ...plot, own: false }));
  const grid = h("div", { class: "charts" });
  const heat = h("div", {});
  const names = h("datalist", { id: "metric-names" });
  const search = h("input", { id: "metric", list: "metric-names", placeholder: "grad_norm, time/wait_data_s …", autocomplete: "off" });
  const all = h("button", { type: "button", class: "ghost", hidden: true, onclick: () => range() }, "Show all");
  const charts = new Map();
  const kept = new Map();
  let [catalogAt, known] = [-Infinity, ""];
  let [revision, fetchedAt, isBusy] = ["", -Infinity, false];

  const window = h("input", { type: "range", id: "window", min: "1", max: "60", value: "12", oninput: (event) => { view.window = Number(event.target.value); later(view, draw); } });
  main.append(h("h1", { class: "visually-hidden" }, "Curves"),
    h("div", { class: "toolbar" },
      choice("Axis", [["steps", "Steps"], ["seconds", "Time"]], "steps", (key) => { view.x = key; range(); }),
      h("label", { for: "window" }, "Smoothing"), window,
      h("label", { class: "check" }, h("input", { type: "checkbox", onchange: (event) => { view.log = event.target.checked; later(view, draw); } }), "logarithmic"),
      h("form", { class: "inline", onsubmit: (event) => { event.preventDefault(); addMetric(search.value.trim()); } },
        h("label", { for: "metric" }, "Add a metric"), search, names, h("button", { type: "submit" }, "Add")),
      all),
    h("p", { class: "dim small" }, "Drag over a plot to enlarge a range in all of them; a double click, or Escape, shows all again. Arrow keys move the crosshair of the plot in focus."),
    grid, card("Staleness over the steps", heat));

  let data = new Map();

  function draw() {
    const options = {
      window: view.window, log: view.log, range: view.range ?? undefined, xLabel: view.x === "steps" ? "step" : "time",
      xText: view.x === "steps" ? undefined : clock,
    };
    for (const plot of plots) {
      const several = plot.metrics.length > 1;
      const dashes = plot.metrics.flatMap((metric, at) => (data.get(metric) ?? []).map((one) => ({
        ...one, name: several ? (page.shown.size > 1 ? `${one.name}: ${metric}` : metric) : one.name,
        colour: several && page.shown.size < 2 ? at : one.colour, dashed: page.shown.size > 1 && at > 0,
      })));
      const key = `${plot.of} ${plot.title}`;
      if (!dashes.length && !plot.own) { charts.get(key)?.element.remove(); charts.get(key)?.close(); charts.delete(key); continue; }
      if (!charts.has(key)) {
        charts.set(key, new LineChart({ title: plot.title, unit: plot.unit, onrange: range }));
        grid.append(charts.get(key).element);
      }
      charts.get(key).set(dashes, options);
    }
    const order = plots.map((plot) => charts.get(`${plot.of} ${plot.title}`)?.element).filter(Boolean);
    if (order.some((one, at) => grid.children[at] !== one)) replace(grid, order);
    if (!charts.size) replace(grid, h("p", { class: "dim" }, "No step has been made yet."));
  }

  function range(begin, end) {
    view.range = begin === undefined ? null : [begin, end];
    all.hidden = view.range === null;
    revision = "";
    fetchedAt = -Infinity;
    refresh();
  }

  async function addMetric(metric) {
    if (!metric || plots.some((plot) => plot.own && plot.title === metric)) return;
    plots.unshift({ title: metric, unit: "", of: "step", metrics: [metric], own: true });
    search.value = "";
    range(...(view.range ?? []));
  }

  async function refresh() {
    const ids = [...page.shown];
    const wanted = JSON.stringify([ids.map((id) => page.states.get(id)?.revision.curves), ids, view.range, view.x, plots.length]);
    if (isBusy || wanted === revision || performance.now() < fetchedAt + REFRESH_MS) return;
    [isBusy, revision, fetchedAt] = [true, wanted, performance.now()];
    const options = { x: view.x, columns: columns(), ...(view.range ? { begin: view.range[0], end: view.range[1] } : {}) };
    try {
      data = await fetchCurves(page, plots.flatMap((plot) => plot.metrics.map((metric) => [metric, plot.of])), options, [...page.shown], kept);
      later(view, draw);
      await refreshHeat();
      if (performance.now() > catalogAt + CATALOG_MS) await refreshNames();
    } finally { isBusy = false; }
  }

  /** Return how many columns the plots have room for, in steps, so that a slightly wider window is no other question. */
  function columns() {
    const width = grid.querySelector(".plotbox")?.clientWidth ?? 400;
    return Math.min(MOST, Math.max(FEWEST, Math.ceil(width / 80) * 40));
  }

  async function refreshHeat() {
    const [id, range] = [page.chosen, view.range && view.x === "steps" ? { begin: view.range[0], end: view.range[1] } : {}];
    const wanted = JSON.stringify([id, page.states.get(id)?.revision.curves, range]);
    if (wanted === known) return;
    const ages = await get(`runs/${id}/staleness`, { columns: FEWEST, ...range }).catch(() => null);
    if (!ages) return;
    known = wanted;
    later(heat, () => replace(heat, heatmap(ages.columns)));
  }

  async function refreshNames() {
    catalogAt = performance.now();
    const catalog = await get(`runs/${page.chosen}/catalog`).catch(() => null);
    if (catalog && catalog.step.length !== names.children.length) later(names, () => replace(names, catalog.step.map((one) => h("option", { value: one }))));
  }

  return { update(isAnew) { if (isAnew) fetchedAt = -Infinity; refresh(); }, close() { never(view); never(heat); never(names); for (const chart of charts.values()) chart.close(); } };
}

/** Shares of trained tokens by age, a column for some steps: the darker, the more. */
export function heatmap(columns) {
  const ages = Object.keys(columns).map(Number);
  if (!ages.length) return h("p", { class: "dim" }, "No step has trained sampled tokens yet.");
  const last = Math.max(...ages);
  const steps = [...new Set(ages.flatMap((age) => columns[age].map((one) => one[0])))].sort((one, two) => one - two);
  const [width, row, left] = [1000, 18, 40];
  const wide = (width - left - 8) / steps.length;
  const height = (last + 1) * row + 26;
  const place = new Map(steps.map((step, at) => [step, at]));
  const cells = ages.flatMap((age) => columns[age].filter((one) => one[1] > 0.001).map(([step, share]) => s("rect", {
    class: "heat", x: (left + place.get(step) * wide).toFixed(1), y: (last - age) * row, width: (wide + 0.4).toFixed(1), height: row - 1, "fill-opacity": (0.1 + 0.9 * share).toFixed(3),
  })));
  const labels = Array.from({ length: last + 1 }, (_, age) => s("text", { class: "tick", x: left - 8, y: (last - age) * row + 13, "text-anchor": "end" }, age === 16 ? "16+" : String(age)));
  const marks = [0, steps.length >> 1, steps.length - 1].map((at, index) => s("text", {
    class: "tick", x: left + at * wide + (index === 1 ? wide / 2 : 0), y: height - 8, "text-anchor": ["start", "middle", "end"][index],
  }, `step ${Math.round(steps[at])}`));
  return [s("svg", { class: "plot fixed", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Staleness from step ${Math.round(steps[0])} to ${Math.round(steps.at(-1))}, ages up to ${last}` }, ...cells, ...labels, ...(steps.length > 2 ? marks : marks.slice(0, 1))),
    h("p", { class: "dim small" }, "Rows are ages in versions; the darker a field, the greater the share of the trained tokens.")];
}
