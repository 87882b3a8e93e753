// What the run waits for: the graph of waits, from the controller to the replica at the root.

import { card, h, replace, seconds, table } from "./dom.js";
import { get } from "./api.js";

const PERIOD_MS = 2000;
const MAX_DEPTH = 12;

export function waits(main, page) {
  const cause = h("p", { class: "cause", role: "status" }, "Asking the controller …");
  const graph = h("div", { class: "graph" });
  const list = h("div", {});
  main.append(h("h1", { class: "visually-hidden" }, "Waits"), card("What the run waits for", cause), card("Wait graph", graph, h("p", { class: "dim small" }, "Lines lead from who waits to who is waited for; a bar shows how much of the time until the deadline is over.")), list);
  let isOpen = true;
  let timer = 0;

  async function ask() {
    const answer = await get(`runs/${page.chosen}/why`).catch((error) => ({ ok: false, text: error.message, data: {} }));
    if (!isOpen) return;
    show(answer);
    timer = setTimeout(ask, document.hidden ? 4 * PERIOD_MS : PERIOD_MS);
  }

  function show(answer) {
    const found = answer.data.waits ?? [];
    const state = page.states.get(page.chosen);
    const told = answer.ok ? answer.data.waiting_for ?? answer.text.split("\n")[0] : state?.live ? state.snapshot.waiting_for : "";
    replace(cause, told ? h("b", {}, told) : null, answer.ok ? null : h("span", { class: "dim" }, answer.text));
    const owners = new Map();
    for (const wait of found) owners.set(wait.owner, [...(owners.get(wait.owner) ?? []), wait]);
    const root = answer.data.root;
    replace(graph, found.length ? branch("controller", owners, root, new Set(), 0) : h("p", { class: "dim" }, answer.ok ? "Nobody waits." : "There is no graph without the controller."));
    const others = [...owners.keys()].filter((one) => one !== "controller" && !(owners.get("controller") ?? []).some((wait) => wait.on === one));
    for (const one of others) graph.append(branch(one, owners, root, new Set(), 0));
    const rows = [...found].sort((one, two) => two.since_s - one.since_s).map((one) => [one.owner, one.on, one.what, seconds(one.since_s), seconds(Math.max(0, one.seconds_left))]);
    replace(list, rows.length ? card("All waits, the longest first", table("All waits", ["who", "on", "for what", "since", "gives up in"], rows, [3, 4])) : null);
  }
  ask();
  return { close() { isOpen = false; clearTimeout(timer); } };
}

function branch(name, owners, root, seen, depth) {
  const found = seen.has(name) || depth > MAX_DEPTH ? [] : owners.get(name) ?? [];
  const inner = new Set([...seen, name]);
  return h("div", { class: "branch" }, h("span", { class: "who" }, name),
    found.length ? h("ul", {}, found.map((wait) => {
      const isRoot = root && wait.owner === root.owner && wait.on === root.on && wait.what === root.what;
      const whole = wait.since_s + Math.max(0, wait.seconds_left);
      const share = whole > 0 ? wait.since_s / whole : 1;
      return h("li", { class: isRoot ? "root" : "" },
        h("div", { class: "wait" }, h("span", {}, wait.what), isRoot ? h("span", { class: "badge stopped" }, "root") : null,
          h("span", { class: "dim" }, `${seconds(wait.since_s)}, ${seconds(Math.max(0, wait.seconds_left))} left`),
          h("div", { class: `progress ${share > 0.8 ? "late" : ""}` }, h("i", { style: { width: `${Math.min(100, share * 100)}%` } }))),
        branch(wait.on, owners, root, inner, depth + 1));
    })) : null);
}
