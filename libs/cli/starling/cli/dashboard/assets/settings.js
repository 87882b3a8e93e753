// Settings of the run and in which runs differ; requests of an operator, where the page may control.

import { card, h, replace, table } from "./dom.js";
import { get, post } from "./api.js";

export function settings(main, page) {
  const control = h("div", {});
  const differing = h("div", {});
  const changed = h("div", {});
  main.append(h("h1", { class: "visually-hidden" }, "Settings"), control, differing, changed);

  async function load() {
    const id = page.chosen;
    const found = await get(`runs/${id}/settings`).catch((error) => ({ problem: error.message, changed: [], dynamic: [] }));
    replace(changed, card("Settings that are no defaults", found.problem ? h("p", { class: "dim" }, found.problem)
      : found.changed.length ? table("Settings", ["setting", "value", "default"], found.changed.map((one) => [one.key, one.value, one.default]))
        : h("p", { class: "dim" }, "The run has no recipe.toml, or only defaults.")));
    replace(control, page.mayControl ? panel(page, id, found.dynamic)
      : card("Control", h("p", { class: "dim" }, "This page only shows. Started with --allow-control, it can evaluate, save a state, change settings, scale, drain and stop."),
        found.dynamic.length ? dynamic(found.dynamic) : null));
    if (page.runs.length > 1) {
      const { names, settings: rows } = await get("compare").catch(() => ({ names: [], settings: [] }));
      replace(differing, card("Settings in which the runs differ", rows.length ? table("Settings that differ", ["setting", ...names], rows.map(([key, values]) => [key, ...values]))
        : h("p", { class: "dim" }, "The runs have the same settings.")));
    }
  }
  return { update(isAnew) { if (isAnew) load(); } };
}

function dynamic(found) {
  return [h("h3", {}, "Settings that may change during the run"), table("Settings that may change", ["setting", "value", "range"], found.map((one) => [one.key, one.value ?? "default", one.range]))];
}

function panel(page, id, found) {
  const name = page.runs[id].name;
  const result = h("p", { class: "note", hidden: true, role: "status" });
  const ask = async (request, confirmation = "") => {
    if (confirmation && !confirm(confirmation)) return false;
    const reply = await post(`runs/${id}/control`, request).catch((error) => ({ ok: false, text: error.message }));
    result.hidden = false;
    result.className = reply.ok ? "note good" : "note bad";
    replace(result, reply.text);
    return reply.ok;
  };
  const changing = h("div", {}, found.length ? dynamic(found) : null);
  return card(`Control ${name}`,
    h("div", { class: "actions" }, evaluation(ask), setting(id, found, ask, changing), checkpoint(ask, name), scaling(page, id, ask), draining(page, id, ask),
      action("Stop", "Finish the step, let all replicas leave, write a checkpoint. `starling run --resume` resumes the run.", "Stop the run", "danger",
        () => ask({ action: "stop" }, `Stop the run ${name}? It finishes its step, drains, and writes a checkpoint; it can be resumed.`))),
    result, changing);
}

function action(title, text, button, css, onsubmit, ...fields) {
  return h("form", { class: "action", onsubmit: (event) => { event.preventDefault(); onsubmit(); } },
    h("h3", {}, title), text ? h("p", { class: "dim" }, text) : null, ...fields, h("button", { type: "submit", class: css }, button));
}

function evaluation(ask) {
  const num = h("input", { id: "num-completions", type: "number", min: "0", value: "0", size: "6" });
  return action("Evaluate", "Evaluate the newest version on the held-out prompts.", "Evaluate", "primary",
    () => ask({ action: "evaluate", num_completions: Number(num.value) || 0 }),
    h("label", { for: "num-completions" }, "Completions of each prompt, 0 as in the recipe"), num);
}

function setting(id, found, ask, changing) {
  const range = h("span", { class: "dim small" });
  const value = h("input", { id: "set-value", required: true, size: "14", autocomplete: "off" });
  const describe = (key) => {
    const one = found.find((each) => each.key === key);
    replace(range, one ? `${one.range}; now ${one.value ?? "the default"}` : "");
  };
  const key = h("select", { id: "set-key", onchange: (event) => describe(event.target.value) }, found.map((one) => h("option", { value: one.key }, one.key)));
  if (found.length) describe(found[0].key);
  // Only the table: the forms may be filled in again, and the answer to a further request may be on its way.
  const reload = async () => {
    found = (await get(`runs/${id}/settings`).catch(() => ({ dynamic: found }))).dynamic;
    replace(changing, dynamic(found));
    describe(key.value);
  };
  const change = async () => { if (await ask({ action: "set", key: key.value, value: value.value })) setTimeout(reload, 1500); };
  return action("Change a setting", "", "Set", "primary", change,
    h("label", { for: "set-key" }, "Setting"), key, h("label", { for: "set-value" }, "New value, from the next step on"), value, range);
}

function checkpoint(ask, name) {
  return action("Checkpoint", "Save a state before the next step, from which the run can resume or another one begin.", "Save a state", "primary",
    () => ask({ action: "checkpoint" }, `Save a state of the run ${name}? The step that is being made is finished first.`));
}

function scaling(page, id, ask) {
  const role = h("select", { id: "scale-role" }, ["rollout", "policy", "reward", "teacher"].map((one) => h("option", { value: one }, one)));
  const num = h("input", { id: "scale-num", type: "number", min: "1", required: true, size: "6" });
  const scale = () => {
    const [wanted, present] = [Number(num.value), replicasOf(page, id).filter((one) => one.role === role.value).length];
    ask({ action: "scale", role: role.value, num: wanted }, `Have ${wanted} replicas of the role ${role.value}, instead of ${present}? ${wanted < present ? "Those that are surplus finish their work and leave." : "The launcher of the run starts those that are missing."}`);
  };
  return action("Scale", "", "Scale", "danger", scale,
    h("label", { for: "scale-role" }, "Role"), role, h("label", { for: "scale-num" }, "Number of replicas"), num);
}

function draining(page, id, ask) {
  const known = h("datalist", { id: "drain-names" });
  const list = () => replace(known, replicasOf(page, id).map((one) => h("option", { value: one.name })));
  const replica = h("input", { id: "drain-name", list: "drain-names", required: true, size: "14", autocomplete: "off", placeholder: "rollout-3", onfocus: list });
  return action("Drain", "Take one replica out of the run; others get its work.", "Drain", "danger",
    () => ask({ action: "drain", name: replica.value.trim() }, `Drain ${replica.value.trim()}? It gets no more work, and leaves; one replica less of its role is desired.`),
    h("label", { for: "drain-name" }, "Replica"), replica, known);
}

function replicasOf(page, id) {
  return page.states.get(id)?.snapshot?.replicas ?? [];
}
