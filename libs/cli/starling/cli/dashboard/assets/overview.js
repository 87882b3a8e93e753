// Overview of one run: figures, what it waits for, topology with versions, groups in progress, reward, staleness.

import { bytes, card, clock, figure, h, moment, patch, s } from "./dom.js";
import { get } from "./api.js";
import { LineChart } from "./chart.js";
import { fetchCurves } from "./curves.js";
import { eventText, kindClass } from "./events.js";

const ROLES = [["policy", "Policies", "train"], ["rollout", "Rollouts", "generate"], ["reward", "Rewards", "score"], ["teacher", "Teachers", "score tokens"]];
const GROUPS = ["waiting", "leased", "generated", "scored", "frozen"];
const GROUP_TEXT = {
  waiting: "waiting for a rollout", leased: "being generated", generated: "being scored", scored: "scored", frozen: "in training",
};
const MANY = 40; // From so many replicas of a role on, each is a small square.
const REFRESH_MS = 2500;

export function overview(main, page) {
  const head = h("div", { class: "headline" });
  const line = h("p", { class: "note", role: "status" });
  const tiles = h("div", { class: "tiles" });
  const topology = h("div", { class: "topology" });
  const groups = h("div", { class: "groups" });
  const reward = new LineChart({ title: "Reward", height: 230 });
  const staleness = h("div", {});
  const newest = h("div", { class: "events", tabindex: "0", role: "region", "aria-label": "List of the newest events" });
  main.append(
    h("h1", { class: "visually-hidden" }, "Overview"), head, line, tiles,
    card("Topology", topology),
    h("div", { class: "two" }, h("section", { class: "card" }, h("h2", { class: "visually-hidden" }, "Reward"), reward.element), card("Staleness of the trained tokens", staleness)),
    h("div", { class: "two" }, card("Groups in progress", groups), card("Newest events", newest)));
  const kept = new Map();
  let revision = "";
  let fetchedAt = -Infinity;

  async function refresh(state) {
    const wanted = `${state.id} ${state.revision.curves} ${state.revision.events}`;
    if (wanted === revision || performance.now() < fetchedAt + REFRESH_MS) return;
    revision = wanted;
    fetchedAt = performance.now();
    const run = `runs/${state.id}`;
    const [found, ages, told] = await Promise.all([
      fetchCurves(page, [["reward", "step"], ["evaluation reward", "evaluation"]], { columns: 300 }, [state.id], kept),
      get(`${run}/staleness`, { columns: 2 }), get(`${run}/events`)]).catch(() => [null]);
    if (found === null || page.chosen !== state.id) return;
    reward.set([
      ...(found.get("reward") ?? []).map((one) => ({ ...one, name: "reward", colour: 0 })),
      ...(found.get("evaluation reward") ?? []).map((one) => ({ ...one, name: "held out", colour: 1, plain: true })),
    ], { window: 8 });
    patch(staleness, histogram(ages.newest, ages.step));
    const shown = told.events.slice(-8).reverse();
    patch(newest, shown.length ? shown.map((event) => h("div", { class: "event" },
      h("time", {}, moment(event.time)), h("span", { class: kindClass(event.kind) }, event.kind), h("span", {}, eventText(event))))
      : h("p", { class: "dim" }, "No events yet."));
  }

  return {
    update() {
      const state = page.states.get(page.chosen);
      if (!state) { patch(line, "Reading the run …"); return; }
      showHead(head, line, state);
      patch(tiles, figures(state));
      showTopology(topology, state);
      patch(groups, pipeline(state.snapshot));
      refresh(state);
    },
    close() { reward.close(); },
  };
}

function showHead(head, line, state) {
  const snapshot = state.snapshot;
  patch(head, h("h2", { class: "runname" }, state.name), h("span", { class: "dim" }, state.attempt),
    h("span", { class: `badge ${state.live ? "running" : state.state}` }, state.live ? snapshot?.phase ?? "running" : state.state));
  let text = "";
  if (state.problem) text = state.problem;
  else if (state.live) text = /^needs /.test(snapshot.waiting_for) ? `The run ${snapshot.waiting_for}` : `Waits for ${snapshot.waiting_for}`;
  else if (state.state === "running") text = `No telemetry from the controller${state.snapshot_age_s ? ` for ${clock(state.snapshot_age_s)}` : " yet"}: it is starting, restarting or elsewhere; the files are followed.`;
  else text = `Nothing runs now${state.reason ? `: ${state.reason}` : ""}; this is what its files say.`;
  if (state.read_share < 1) text += ` Reading metrics.jsonl: ${Math.floor(state.read_share * 100)} %.`;
  patch(line, text, [...snapshot?.notices ?? [], ...snapshot?.alarms ?? []].map((one) => h("span", { class: "alarm" }, one)));
}

function figures(state) {
  const { snapshot, figures: found } = state;
  const version = snapshot?.version ?? Math.max(0, state.newest_step);
  const goal = snapshot?.last_step;
  const rate = (snapshot?.replicas ?? []).filter((one) => one.role === "rollout").reduce((sum, one) => sum + (one.gauges.tokens_per_s ?? 0), 0);
  const elapsed = snapshot?.elapsed_s ?? (state.newest && state.begun ? state.newest - state.begun : null);
  const left = goal > version && found.step_time ? (goal - version) * found.step_time : null;
  const progress = goal ? h("div", { class: "progress", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": String(goal), "aria-valuenow": String(version), "aria-label": "Steps" },
    h("i", { style: { width: `${Math.min(100, (version / goal) * 100)}%` } })) : null;
  return [
    tile("version", figure(version), goal ? `of ${figure(goal)}` : "", progress),
    tile("reward", figure(found.reward), "last steps"),
    found.evaluation !== null ? tile("held out", figure(found.evaluation), "newest evaluation") : null,
    tile("tokens/s", figure(rate || found.throughput), rate ? "rollouts now" : "last steps"),
    tile("staleness", figure(found.staleness), "versions, mean"),
    tile("step time", found.step_time === null ? "–" : `${figure(found.step_time)} s`, "last steps"),
    tile("elapsed", clock(elapsed), left !== null && state.live ? `about ${clock(left)} left` : ""),
  ];
}

function tile(label, value, note, extra = null) {
  return h("div", { class: "tile" }, h("span", { class: "label" }, label), h("b", {}, value), h("span", { class: "sub" }, note), extra);
}

function showTopology(element, state) {
  const snapshot = state.snapshot;
  if (!snapshot) {
    patch(element, h("p", { class: "dim" }, state.state === "running" ? "The controller has not reported yet." : "No controller runs: there are no replicas."));
    return;
  }
  const newest = snapshot.version;
  const lanes = ROLES.map(([role, title, verb]) => [role, title, verb, snapshot.replicas.filter((one) => one.role === role)])
    .filter(([role, , , replicas]) => replicas.length || role !== "teacher");
  patch(element,
    h("div", { class: "hub" }, h("b", {}, "Controller"), h("span", {}, `version ${newest}`), h("span", { class: "dim" }, snapshot.phase),
      snapshot.dropped ? h("span", { class: "bad" }, `${snapshot.dropped} messages refused`) : null),
    h("div", { class: "lanes" }, lanes.map(([role, title, verb, replicas]) => h("div", { class: "lane" },
      h("h3", {}, title, h("span", { class: "dim" }, ` ${replicas.length} · ${verb}`)),
      replicas.length === 0 ? h("p", { class: "dim" }, "none") : null,
      h("div", { class: replicas.length >= MANY ? "nodes many" : "nodes" },
        replicas.map((one) => (replicas.length >= MANY ? square(one, newest) : node(one, newest))))))),
    h("p", { class: "legend" }, [["fresh", "newest version"], ["late", "one behind"], ["old", "older"]].map(([css, text]) =>
      h("span", { class: "key" }, h("i", { class: `age ${css}` }), text))));
}

function age(replica, newest) {
  if (replica.role !== "policy" && replica.role !== "rollout") return "none";
  const behind = newest - replica.version;
  return replica.version < 0 ? "old" : behind <= 0 ? "fresh" : behind === 1 ? "late" : "old";
}

function describe(replica) {
  const holds = replica.role === "policy" || replica.role === "rollout";
  return `${replica.name}${holds ? `: version ${replica.version < 0 ? "none" : replica.version}` : ""}, ${replica.num_leases} in hand`;
}

function square(replica, newest) {
  return h("span", { class: `square ${age(replica, newest)} ${replica.num_leases ? "busy" : ""}`, title: describe(replica), role: "img", "aria-label": describe(replica) });
}

function node(replica, newest) {
  const holds = replica.role === "policy" || replica.role === "rollout";
  const speed = replica.gauges.tokens_per_s;
  const cache = replica.gauges.kv_cache_share;
  const pull = replica.progress;
  const share = pull && pull.bytes_total ? pull.bytes_done / pull.bytes_total : 0;
  return h("div", { class: `node ${age(replica, newest)}` },
    h("div", { class: "nodehead" }, h("b", {}, replica.name), holds ? h("span", { class: "version" }, replica.version < 0 ? "no version" : `v${replica.version}`) : null),
    h("div", { class: "nodebody" }, h("span", {}, replica.num_leases ? `${replica.num_leases} in hand` : "idle"), speed ? h("span", {}, `${figure(speed)} tokens/s`) : null,
      cache === undefined ? null : h("span", {}, `KV cache ${Math.round(cache * 100)} %`)),
    pull ? h("div", { class: "pull" }, h("span", {}, `pulls v${replica.pulling}: ${bytes(pull.bytes_done)} of ${bytes(pull.bytes_total)}`),
      h("div", { class: "progress" }, h("i", { style: { width: `${share * 100}%` } }))) : null);
}

function pipeline(snapshot) {
  if (!snapshot) return h("p", { class: "dim" }, "No controller runs.");
  const total = GROUPS.reduce((sum, name) => sum + (snapshot.groups[name] ?? 0), 0);
  return [
    h("div", { class: "stack", role: "img", "aria-label": `${total} groups in progress` }, GROUPS.map((name, at) => {
      const num = snapshot.groups[name] ?? 0;
      return num ? h("i", { class: `c${at}`, style: { "flex-grow": String(num) } }) : null;
    })),
    h("ol", { class: "stages" }, GROUPS.map((name, at) => h("li", {}, h("i", { class: `c${at}` }), h("b", {}, String(snapshot.groups[name] ?? 0)), h("span", {}, GROUP_TEXT[name])))),
    snapshot.num_prompts ? h("p", { class: "dim" }, `${snapshot.num_answered} of ${snapshot.num_prompts} prompts are answered`) : null,
  ];
}

/** Bars of the shares of trained tokens by age in versions. */
export function histogram(shares, step) {
  const ages = Object.keys(shares).map(Number);
  if (!ages.length) return h("p", { class: "dim" }, "No step has trained sampled tokens yet.");
  const last = Math.max(...ages);
  const [width, height, gap] = [520, 230, 6];
  const wide = Math.min(84, (width - 20) / (last + 1));
  const most = Math.max(...Object.values(shares));
  const texts = [];
  const bars = Array.from({ length: last + 1 }, (_, at) => {
    const share = shares[at] ?? 0;
    const tall = (share / most) * (height - 48);
    texts.push(`${at}${at === 16 ? " and older" : ""}: ${(share * 100).toFixed(1)} %`);
    const x = 10 + at * wide;
    return [
      s("rect", { class: "bar c0", x: x + gap / 2, y: height - 24 - tall, width: wide - gap, height: Math.max(tall, share > 0 ? 1.5 : 0), rx: 2 }),
      s("text", { class: "tick", x: x + wide / 2, y: height - 8, "text-anchor": "middle" }, at === 16 ? "16+" : String(at)),
      share >= 0.005 ? s("text", { class: "tick strong", x: x + wide / 2, y: height - 30 - tall, "text-anchor": "middle" }, `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`) : null,
    ];
  });
  return [
    s("svg", { class: "plot fixed", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Staleness of step ${step}: ${texts.join(", ")}` }, ...bars.flat()),
    h("p", { class: "dim small" }, `Share of trained tokens by age in versions, step ${step}.`),
  ];
}
