// Weight publications as a timeline: a lane for each replica, a bar for each adoption.

import { bytes, card, choice, clock, h, moment, replace, s, seconds, table } from "./dom.js";
import { get } from "./api.js";
import { ticks } from "./chart.js";
import { later, never } from "./frames.js";

const REFRESH_MS = 2500;
const MAX_LANES = 40;

export function weights(main, page) {
  const chart = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Timeline of publications" });
  const detail = h("div", { class: "note", hidden: true, role: "status" });
  const list = h("div", {});
  const view = { num: "12" };
  let [revision, fetchedAt] = ["", -Infinity];
  main.append(h("h1", { class: "visually-hidden" }, "Weights"),
    h("div", { class: "toolbar" }, choice("Publications", [["6", "Last 6"], ["12", "12"], ["24", "24"], ["60", "60"]], "12", (key) => { view.num = key; refresh(true); })),
    card("Weight publications", h("p", { class: "legend" },
      h("span", { class: "key" }, h("i", { class: "swatch publish" }), "publish (training waits)"), h("span", { class: "key" }, h("i", { class: "swatch waited" }), "messages and waiting"),
      h("span", { class: "key" }, h("i", { class: "swatch read" }), "pull"), h("span", { class: "key" }, h("i", { class: "swatch switch" }), "switch (generation pauses)")), chart, detail),
    list);

  async function refresh(isAnew) {
    const state = page.states.get(page.chosen);
    const wanted = `${page.chosen} ${state?.revision.weights} ${view.num}`;
    if (!isAnew && (wanted === revision || performance.now() < fetchedAt + REFRESH_MS)) return;
    [revision, fetchedAt] = [wanted, performance.now()];
    const found = await get(`runs/${page.chosen}/weights`, { num: view.num }).catch(() => null);
    never(chart);
    never(list);
    if (!found || !found.publications.length) { replace(chart, h("p", { class: "dim" }, "No version has been published yet.")); replace(list); return; }
    const show = (text) => { detail.hidden = false; replace(detail, text); };
    later(chart, () => replace(chart, timeline(found.publications, Math.max(640, chart.clientWidth - 4), show)));
    later(list, () => replace(list, h("div", { class: "two" }, card(`Publications (${found.num} in all)`, publications(found.publications)), card("Slowest pulls", slowest(found.slowest)))));
  }
  return { update: refresh, close() { never(chart); never(list); } };
}

function timeline(found, width, show) {
  const replicas = [...new Set(found.flatMap((one) => one.adoptions.map((each) => each.replica)))].sort((one, two) => one.localeCompare(two, "en", { numeric: true }));
  const lanes = ["policy", ...replicas.slice(0, MAX_LANES)];
  const begin = Math.min(...found.map((one) => one.time - (one.publish_s ?? 0)));
  const end = Math.max(...found.flatMap((one) => [one.time, ...one.adoptions.map((each) => one.time + each.after_s)])) + 0.001;
  const [left, top, row] = [110, 22, 26];
  const height = top + lanes.length * row + 24;
  const x = (time) => left + ((time - begin) / (end - begin)) * (width - left - 14);
  const wide = (from, to) => Math.max(2, x(to) - x(from));
  const bar = (css, from, to, lane, text) => s("rect", { class: `gantt ${css}`, x: x(from), y: top + lane * row + 5, width: wide(from, to), height: row - 10, rx: 2,
    tabindex: css === "read" || css === "publish" ? "0" : false, role: css === "read" || css === "publish" ? "img" : false, "aria-label": css === "read" || css === "publish" ? text : false,
    onpointerenter: () => show(text), onfocus: () => show(text) });
  const parts = [];
  lanes.forEach((name, at) => {
    parts.push(s("text", { class: "tick strong", x: left - 10, y: top + at * row + 17, "text-anchor": "end" }, name));
    parts.push(s("line", { class: "grid", x1: left, x2: width - 14, y1: top + (at + 1) * row, y2: top + (at + 1) * row }));
  });
  for (const one of found) {
    parts.push(s("line", { class: "cross", x1: x(one.time), x2: x(one.time), y1: top - 4, y2: height - 22 }));
    parts.push(s("text", { class: "tick", x: x(one.time), y: 12, "text-anchor": "middle" }, `v${one.version}`));
    parts.push(bar("publish", one.time - (one.publish_s ?? 0), one.time, 0, `Version ${one.version}, published ${moment(one.time)}: training waited ${seconds(one.publish_s)}, the offer took ${seconds(one.offer_s)}; ${one.num_adopted} adoptions`));
    for (const each of one.adoptions) {
      const lane = lanes.indexOf(each.replica);
      if (lane < 0) continue;
      const adopted = one.time + each.after_s;
      const text = `${each.replica} adopted version ${one.version} ${seconds(each.after_s)} after its publication: pull ${seconds(each.pull_s)}, pause ${seconds(each.pause_s)}, ${bytes(each.sent_bytes ?? each.size_bytes)} by ${each.transport || "an unknown transport"}${each.source ? ` from ${each.source}` : ""}${each.attested ? "" : "; not proven"}`;
      const from = Math.max(one.time, adopted - each.pause_s - each.pull_s);
      parts.push(bar("waited", one.time, from, lane, text), bar("read", from, adopted - each.pause_s, lane, text), bar("switch", adopted - each.pause_s, adopted, lane, text));
    }
  }
  for (const at of ticks(0, end - begin, Math.floor(width / 120))) {
    parts.push(s("text", { class: "tick", x: x(begin + at), y: height - 6, "text-anchor": "middle" }, end - begin > 120 ? clock(at) : `${at.toPrecision(3)} s`));
  }
  const more = replicas.length > MAX_LANES ? h("p", { class: "dim" }, `${replicas.length - MAX_LANES} more replicas`) : null;
  return [s("svg", { class: "plot fixed", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Publications and adoptions over time" }, ...parts), more];
}

function publications(found) {
  const rows = [...found].reverse().map((one) => {
    const slow = one.adoptions.reduce((most, each) => Math.max(most, each.after_s), 0);
    return [`v${one.version}`, moment(one.time), seconds(one.publish_s), seconds(one.offer_s), String(one.num_adopted), one.adoptions.length ? seconds(slow) : "–"];
  });
  return table("Publications", ["version", "at", "publish", "offer", "adopted", "last after"], rows, [2, 3, 4, 5]);
}

function slowest(found) {
  return found.length ? table("Slowest pulls", ["replica", "version", "pull", "pause"], found.map((one) => [one.replica, `v${one.version}`, seconds(one.pull_s), seconds(one.pause_s)]), [2, 3])
    : h("p", { class: "dim" }, "No replica has pulled yet.");
}
