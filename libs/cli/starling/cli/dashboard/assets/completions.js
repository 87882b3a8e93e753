// Browser of completions: prompt, completion, reward and its parts, and each token coloured by log-probability or version.

import { choice, figure, h, replace, visible } from "./dom.js";
import { get, getBlob } from "./api.js";
import { later, never } from "./frames.js";

const NUM = 10;
const FRAME_MS = 125;
const HELD = 240; // frames of a folder in memory
const TURN = 250; // tokens that are made or coloured in one turn

export function completions(main, page) {
  const query = { order: "newest", skip: 0, text: "", first_step: "", last_step: "", min_reward: "", max_reward: "" };
  const list = h("div", { class: "samples" });
  const count = h("span", { class: "dim", role: "status" });
  const more = h("button", { type: "button", hidden: true, onclick: () => load(true) }, "Show more");
  const fresh = h("button", { type: "button", class: "ghost", hidden: true, onclick: () => load(false) }, "Show newer ones");
  const colour = { by: "logprob" };
  let known = -1;

  const field = (label, name, type, size) => {
    const input = h("input", { id: `filter-${name}`, type, step: "any", size, onchange: (event) => { query[name] = event.target.value.trim(); load(false); } });
    return [h("label", { for: `filter-${name}` }, label), input];
  };
  main.append(h("h1", { class: "visually-hidden" }, "Completions"),
    h("div", { class: "toolbar" },
      choice("Order", [["newest", "Newest"], ["best", "Best"], ["worst", "Worst"], ["longest", "Longest"], ["oldest", "Oldest"]], "newest", (key) => { query.order = key; load(false); }),
      field("steps", "first_step", "number", 6), field("to", "last_step", "number", 6),
      field("reward", "min_reward", "number", 6), field("to", "max_reward", "number", 6), field("contains", "text", "search", 14),
      choice("Colour of tokens", [["logprob", "Log-probability"], ["version", "Version"]], "logprob", (key) => { colour.by = key; for (const one of list.children) one.recolour?.(); })),
    h("div", { class: "toolbar" }, count, fresh), h("h2", { class: "visually-hidden" }, "Sample completions"), list, more);

  async function load(isMore) {
    if (!isMore) query.skip = 0;
    const id = page.chosen;
    const answer = await get(`runs/${id}/completions`, { ...query, num: NUM }).catch((error) => ({ completions: [], num: 0, problem: error.message }));
    known = answer.revision ?? 0;
    fresh.hidden = true;
    const cards = answer.completions.map((one) => sample(id, one, colour));
    if (isMore) list.append(...cards); else replace(list, cards);
    query.skip += cards.length;
    more.hidden = query.skip >= answer.num || !cards.length;
    replace(count, answer.problem ?? `${answer.num.toLocaleString("en")} completion${answer.num === 1 ? "" : "s"}`);
    if (!list.children.length && !answer.problem) {
      replace(list, h("p", { class: "dim" }, "No stored completion matches. logging.samples_per_step says how many of each step are stored."));
    }
  }

  return {
    update(isAnew) {
      if (isAnew) { load(false); return; }
      const num = page.states.get(page.chosen)?.revision.samples ?? 0;
      if (num > known && known >= 0) {
        if (!list.querySelector(".sample")) load(false);
        else { replace(fresh, `Show ${num - known} newer`); fresh.hidden = false; }
      }
    },
  };
}

function sample(id, one, colour) {
  const text = h("pre", { class: "completion", tabindex: "0", "aria-label": "Completion" }, visible(one.completion));
  const legend = h("p", { class: "legend" });
  const parts = Object.entries(one.parts).flatMap(([kind, values]) => Object.entries(values).map(([name, value]) => ({ kind, name, value })));
  const versions = one.oldest_version === one.newest_version ? `version ${one.newest_version}` : `versions ${one.oldest_version} to ${one.newest_version}`;
  const media = h("div", { class: "media" });
  const element = h("article", { class: "card sample" },
    h("header", {},
      h("b", { class: `reward ${one.reward === null ? "" : one.reward > 0 ? "good" : "low"}` }, one.reward === null ? "no reward" : `reward ${figure(one.reward)}`),
      h("span", {}, `step ${one.step}`), h("span", {}, `${one.num_tokens} tokens`), h("span", {}, versions),
      one.num_turns > 1 ? h("span", {}, `${one.num_turns} turns`) : null,
      one.status !== "ok" ? h("span", { class: "badge stopped" }, one.status) : null, h("span", { class: "dim id" }, one.prompt_id)),
    parts.length ? h("ul", { class: "parts", "aria-label": "Parts of the reward" }, parts.map((part) => h("li", { class: part.kind },
      h("span", {}, part.kind === "score" ? part.name : part.kind === "env" ? `environment ${part.name}` : `evaluation ${part.name}`), h("b", {}, figure(part.value))))) : null,
    h("h3", {}, "Prompt"), h("pre", { tabindex: "0", "aria-label": "Prompt" }, visible(one.prompt)), media,
    h("h3", {}, "Completion"), text, legend);
  one.media.forEach((item, at) => showMedia(media, id, one.key, item, at));
  if (one.has_tokens) showTokens(element, text, legend, id, one.key, colour);
  return element;
}

async function showMedia(element, id, key, item, number) {
  const load = async (button) => {
    button.disabled = true;
    try {
      const blob = await getBlob(`runs/${id}/media`, { key, number });
      if (blob.type === "application/json") {
        const { frames } = JSON.parse(await blob.text());
        button.replaceWith(filmOf(frames, item.name, (frame) => getBlob(`runs/${id}/media`, { key, number, frame })));
        return;
      }
      const url = URL.createObjectURL(blob);
      const shown = blob.type.startsWith("video/") ? h("video", { src: url, controls: true, loop: true, muted: true, playsinline: true, "aria-label": item.name })
        : h("img", { src: url, alt: item.name });
      button.replaceWith(shown);
    } catch (error) { button.replaceWith(h("span", { class: "dim" }, `${item.name}: ${error.message}`)); }
  };
  const button = h("button", { type: "button", onclick: () => load(button) }, `Show the ${item.kind} ${item.name}`);
  element.append(button);
  if (number < 4) new IntersectionObserver((entries, self) => {
    if (entries.some((one) => one.isIntersecting)) { self.disconnect(); load(button); }
  }).observe(button);
}

/** A video that is a folder of frames: one at a time, by a slider, or playing. At most `HELD` are in memory. */
function filmOf(num, name, read) {
  const urls = new Map();
  const image = h("img", { alt: `${name}, frame 1 of ${num}` });
  const place = h("span", { class: "dim" });
  const slider = h("input", { type: "range", min: "0", max: String(num - 1), value: "0", "aria-label": `Frame of ${name}`, oninput: () => { stop(); show(Number(slider.value)); } });
  let [wanted, timer] = [0, 0];
  async function show(at) {
    wanted = at;
    if (!urls.has(at)) {
      const blob = await read(at).catch((error) => { replace(place, error.message); return null; });
      if (!blob) { stop(); return; }
      urls.set(at, URL.createObjectURL(blob));
      if (urls.size > HELD) { const [oldest, url] = urls.entries().next().value; urls.delete(oldest); URL.revokeObjectURL(url); }
    }
    if (wanted !== at || !urls.has(at)) return;
    image.src = urls.get(at);
    image.alt = `${name}, frame ${at + 1} of ${num}`;
    slider.value = String(at);
    replace(place, `frame ${at + 1} of ${num}`);
  }
  const stop = () => { clearTimeout(timer); timer = 0; replace(play, "Play"); };
  const next = async () => {
    await show((wanted + 1) % num);
    if (timer && image.isConnected) timer = setTimeout(next, FRAME_MS);
  };
  const play = h("button", { type: "button", onclick: () => {
    if (timer) { stop(); return; }
    replace(play, "Pause");
    timer = setTimeout(next, 0);
  } }, "Play");
  show(0);
  return h("div", { class: "film" }, image, h("div", { class: "toolbar" }, play, slider, place));
}

/** Replace the text by its tokens once the completion is visible. */
function showTokens(element, text, legend, id, key, colour) {
  let shown = null;
  element.recolour = () => shown?.paint(colour.by);
  new IntersectionObserver(async (entries, self) => {
    if (!entries.some((one) => one.isIntersecting)) return;
    self.disconnect();
    const tokens = await get(`runs/${id}/tokens`, { key }).catch(() => null);
    if (!tokens || !element.isConnected) return;
    shown = new Tokens(tokens, text, legend);
    shown.paint(colour.by);
  }, { rootMargin: "200px" }).observe(element);
}

/** The tokens of a completion, each an element, made and coloured in turns of `TURN`: there may be thousands. */
class Tokens {
  constructor(tokens, text, legend) {
    Object.assign(this, { tokens, legend, spans: [], by: "" });
    this.versions = [...new Set(tokens.versions)].filter((one) => one >= 0).sort((one, two) => one - two);
    this.strip = text;
    if (!tokens.texts) { // Without the model's tokenizer their texts are not known.
      this.strip = h("pre", { class: "tokens", tabindex: "0", "aria-label": "Tokens" });
      text.after(this.strip);
    }
    this.strip.addEventListener("pointerover", (event) => this.#describe(event.target));
  }

  paint(by) {
    this.by = by;
    const { versions } = this;
    if (by === "version") replace(this.legend, versions.map((one, at) => h("span", { class: "key" }, h("i", { class: `c${at % 8}` }), `version ${one}`)));
    else replace(this.legend, LEVELS.map(([, css, label]) => h("span", { class: "key" }, h("i", { class: `swatch ${css}` }), label)));
    this.#turn(0);
  }

  #turn(from) {
    const to = Math.min(from + TURN, this.tokens.ids.length);
    const made = [];
    for (let at = from; at < to; at += 1) {
      if (at < this.spans.length) { this.spans[at].className = this.#css(at); continue; }
      const span = h("span", { class: this.#css(at) }, visible(this.#piece(at)));
      span.number = at;
      this.spans.push(span);
      made.push(span);
    }
    if (from === 0 && made.length) this.strip.replaceChildren();
    this.strip.append(...made);
    if (to < this.tokens.ids.length) later(this, () => { if (this.strip.isConnected) this.#turn(to); });
    else never(this);
  }

  #piece(at) {
    return this.tokens.texts ? this.tokens.texts[at] : `#${this.tokens.ids[at]} `;
  }

  #css(at) {
    return this.by === "version" ? `token c${this.versions.indexOf(this.tokens.versions[at]) % 8} tint` : `token ${surprise(this.tokens.logprobs[at])}`;
  }

  /** Say of the token under the pointer what it is. */
  #describe(span) {
    const at = span.number;
    if (at === undefined || span.title) return;
    const { ids, logprobs, versions } = this.tokens;
    const probability = logprobs[at] === null ? "–" : figure(Math.exp(logprobs[at]));
    span.title = `${visible(this.#piece(at))}\ntoken ${ids[at]}\nlog-probability ${figure(logprobs[at])}, probability ${probability}\nversion ${versions[at]}`;
  }
}

const LEVELS = [[-0.105, "p0", "p > 0.9"], [-0.693, "p1", "0.5 to 0.9"], [-1.609, "p2", "0.2 to 0.5"], [-3, "p3", "0.05 to 0.2"], [-Infinity, "p4", "below 0.05"]];

function surprise(logprob) {
  return logprob === null ? "" : LEVELS.find(([limit]) => logprob >= limit)[1];
}
