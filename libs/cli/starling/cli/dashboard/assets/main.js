// The page: token, views, runs, and what is told of each run live.

import { h, replace } from "./dom.js";
import { later } from "./frames.js";
import { ApiError, findToken, follow, get, keepToken } from "./api.js";
import { overview } from "./overview.js";
import { curves } from "./curves.js";
import { completions } from "./completions.js";
import { weights } from "./weights.js";
import { waits } from "./waits.js";
import { events } from "./events.js";
import { settings } from "./settings.js";

const VIEWS = { overview, curves, completions, weights, waits, events, settings };
const TITLES = {
  overview: "Overview", curves: "Curves", completions: "Completions", weights: "Weights", waits: "Waits",
  events: "Events", settings: "Settings",
};

/** What all views share. */
const page = {
  runs: [], plots: [], mayControl: false,
  states: new Map(), // by id: what the server has told last
  shown: new Set(), // ids of the runs in curves
  chosen: 0, // id of the run of all other views
  toast,
};
let view = null;
let name = "";

function toast(text, isBad = false) {
  const one = h("div", { class: isBad ? "toast bad" : "toast" }, text);
  document.getElementById("toasts").append(one);
  setTimeout(() => one.remove(), 8000);
}

function showTabs() {
  replace(document.getElementById("tabs"), Object.keys(VIEWS).map((key) => h("a", {
    href: `#/${key}`, "aria-current": key === name ? "page" : false,
  }, TITLES[key])));
  document.querySelector("#tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

function showRuns() {
  const several = page.runs.length > 1;
  replace(document.getElementById("runs"), page.runs.map((run) => {
    const state = page.states.get(run.id);
    const label = state?.live ? state.snapshot?.phase ?? "running" : state?.problem ? "absent" : state?.state ?? "…";
    const chip = h("span", { class: `chip ${run.id === page.chosen ? "chosen" : ""}` },
      several ? h("input", {
        type: "checkbox", checked: page.shown.has(run.id), "aria-label": `Show ${run.name} in curves`,
        onchange: (event) => {
          if (event.target.checked) page.shown.add(run.id); else page.shown.delete(run.id);
          view?.update?.(true);
        },
      }) : null,
      h("button", {
        type: "button", class: "pick", "aria-pressed": run.id === page.chosen ? "true" : "false", title: run.folder,
        onclick: () => choose(run.id),
      }, h("i", { class: `c${run.id % 8}` }), h("span", { class: "name" }, run.name),
      h("span", { class: `state ${state?.live ? "running" : label}` }, label)));
    return chip;
  }));
}

function choose(id) {
  if (page.chosen === id) return;
  page.chosen = id;
  showRuns();
  open(true);
}

function open(anew = false) {
  const wanted = location.hash.slice(1).replace(/^\//, "");
  if (wanted === "main") return; // the link that skips the head
  const key = VIEWS[wanted] ? wanted : "overview";
  if (key === name && !anew) return;
  view?.close?.();
  name = key;
  document.title = `${TITLES[key]} · Starling`;
  showTabs();
  const main = document.getElementById("main");
  main.replaceChildren();
  main.dataset.view = key;
  view = VIEWS[key](main, page);
  view.update?.(true);
}

function told(state) {
  const before = page.states.get(state.id);
  page.states.set(state.id, state);
  if (!before || before.live !== state.live || before.state !== state.state || before.problem !== state.problem
    || before.snapshot?.phase !== state.snapshot?.phase) showRuns();
  // Curves have all runs that are shown, the other views one.
  if (state.id === page.chosen || (name === "curves" && page.shown.has(state.id))) later(page, () => view?.update?.(false));
}

function askToken(sentence) {
  const field = h("input", { type: "password", id: "token", autocomplete: "off", size: "40" });
  const form = h("form", {
    class: "card login",
    onsubmit: (event) => {
      event.preventDefault();
      const text = field.value.trim();
      keepToken(/token=([A-Za-z0-9_-]+)/.exec(text)?.[1] ?? text);
      start();
    },
  }, h("h1", {}, "Starling"), h("p", { class: "dim" }, sentence),
  h("label", { for: "token" }, "Token"), field, h("button", { type: "submit", class: "primary" }, "Open"));
  replace(document.getElementById("main"), form);
  field.focus();
}

function showLink(isThere, sentence = "") {
  const link = document.getElementById("link");
  link.className = isThere ? "link good" : "link bad";
  replace(link, isThere ? "live" : sentence);
}

function setTheme() {
  const kept = localStorage.getItem("starling-theme");
  const root = document.documentElement;
  if (kept) root.dataset.theme = kept;
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const show = () => replace(button, isDark() ? "☀" : "☾");
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("starling-theme", root.dataset.theme);
    show();
  });
  show();
}

async function start() {
  try {
    const found = await get("runs");
    Object.assign(page, { runs: found.runs, plots: found.plots, mayControl: found.may_control });
  } catch (error) {
    const isToken = error instanceof ApiError && error.status === 401;
    askToken(isToken ? "Open the address that `starling dashboard` has printed, or enter its token." : error.message);
    return;
  }
  page.shown = new Set(page.runs.map((run) => run.id));
  showRuns();
  open(true);
  addEventListener("hashchange", () => open());
  follow(told, showLink).catch((error) => askToken(error.message));
}

setTheme();
findToken();
showTabs();
start();
