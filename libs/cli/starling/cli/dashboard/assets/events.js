// Events: alarms, joins and losses, evaluations, changes by operators; failures by reason; all replicas that ever joined.

import { card, figure, h, moment, patch, replace, seconds, table } from "./dom.js";
import { get } from "./api.js";

const REFRESH_MS = 2000;
const BAD = new Set(["alarm", "notice", "problem", "left", "failed", "discarded", "invalid", "refused", "set_aside", "offers_no_more", "relays_no_more", "waiting", "begun_anew", "reopened", "step_dispatched_again", "tail", "names_left_out", "logger"]);
const GOOD = new Set(["joined", "checkpoint", "checkpoint_requested", "state", "alarm_over", "evaluation"]);
const MAX_SHOWN = 400;

export function kindClass(kind) {
  return `kind ${BAD.has(kind) ? "bad" : GOOD.has(kind) ? "good" : ""}`;
}

/** Return the fields of an event as one sentence of names and values. */
export function eventText(event) {
  const { text } = event;
  if (event.kind === "joined") return `${text.replica ?? ""} on ${text.host ?? "an unknown host"}`;
  if (event.kind === "left") return `${text.replica ?? ""}: ${text.reason ?? ""}`;
  if (event.kind === "notice" || event.kind === "problem") return text.text ?? "";
  if (event.kind === "alarm") return text.text ?? text.name ?? "";
  if (event.kind === "evaluation") {
    const shown = Object.entries(text).filter(([name]) => !["version", "cause", "k", "num_prompts", "num_failed"].includes(name));
    return `version ${text.version} on ${text.num_prompts} prompts: ${shown.map(([name, value]) => `${name} ${short(value)}`).join(", ")}`;
  }
  return Object.entries(text).map(([name, value]) => `${name} ${short(value)}`).join(" · ");
}

/** Return a number in about four digits, and any other text as it is. */
function short(value) {
  return /^-?[0-9.]+(e-?[0-9]+)?$/.test(value) ? figure(Number(value)) : value;
}

export function events(main, page) {
  const list = h("div", { class: "events", tabindex: "0", role: "region", "aria-label": "List of events" });
  const kinds = h("div", { class: "filters", role: "group", "aria-label": "Kinds of events" });
  const failures = h("div", {});
  const replicas = h("div", {});
  const off = new Set();
  let [found, revision, fetchedAt] = [[], "", -Infinity];
  main.append(h("h1", { class: "visually-hidden" }, "Events"), card("Events", kinds, list), card("Failures by reason", failures), card("Replicas that ever joined", replicas));

  function show() {
    const counts = new Map();
    for (const event of found) counts.set(event.kind, (counts.get(event.kind) ?? 0) + 1);
    replace(kinds, [...counts].sort().map(([kind, num]) => h("button", {
      type: "button", class: "filter", "aria-pressed": off.has(kind) ? "false" : "true",
      onclick: () => { if (off.has(kind)) off.delete(kind); else off.add(kind); show(); },
    }, `${kind} ${num}`)));
    const shown = found.filter((event) => !off.has(event.kind)).slice(-MAX_SHOWN).reverse();
    patch(list, shown.length ? shown.map((event) => h("div", { class: "event" }, h("time", {}, moment(event.time, true)),
      h("span", { class: kindClass(event.kind) }, event.kind), h("span", {}, eventText(event)))) : h("p", { class: "dim" }, "No events."));
  }

  async function refresh(isAnew) {
    const wanted = `${page.chosen} ${page.states.get(page.chosen)?.revision.events}`;
    if (!isAnew && (wanted === revision || performance.now() < fetchedAt + REFRESH_MS)) return;
    [revision, fetchedAt] = [wanted, performance.now()];
    const id = page.chosen;
    const [told, rows] = await Promise.all([get(`runs/${id}/events`), get(`runs/${id}/replicas`)]).catch(() => [{ events: [], failures: [] }, []]);
    found = told.events;
    show();
    patch(failures, told.failures.length ? table("Failures by reason", ["kind", "status", "reason", "times", "last"],
      [...told.failures].sort((one, two) => two.num - one.num).map((one) => [one.kind, one.status, one.reason, String(one.num), moment(one.last, true)]), [3])
      : h("p", { class: "dim" }, "No group and no reward has failed."));
    patch(replicas, rows.length ? table("Replicas", ["replica", "role", "host", "first joined", "joined", "left", "lost", "adopted", "slowest pull", "last reason"],
      rows.map((one) => [one.name, one.role, one.host, moment(one.first_joined, true), one.joined, one.left, one.lost, one.adopted, one.adopted ? seconds(one.pull_max_s) : "–", one.last_reason]), [4, 5, 6, 7, 8])
      : h("p", { class: "dim" }, "No replica has joined yet."));
  }
  return { update: refresh };
}
