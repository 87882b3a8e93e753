// Elements and texts. Texts are always text nodes: names, reasons and completions come from others.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element: attributes by name, `on...` as listeners, `style` as an object; children are nodes or texts. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value") element.value = value;
    else if (name === "checked") element.checked = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : visible(child));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

/** Make the children of an element equal to `children`, and leave alone what is so already. Not for nodes with listeners. */
export function patch(element, ...children) {
  const fresh = document.createDocumentFragment();
  append(fresh, children);
  morph(element, fresh);
}

function morph(old, fresh) {
  const [olds, news] = [[...old.childNodes], [...fresh.childNodes]];
  news.forEach((node, at) => {
    const before = olds[at];
    if (before === undefined) old.append(node);
    else if (before.nodeName !== node.nodeName) before.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) { if (before.data !== node.data) before.data = node.data; }
    else { sync(before, node); morph(before, node); }
  });
  for (const extra of olds.slice(news.length)) extra.remove();
}

function sync(old, fresh) {
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
}

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** Return a text with control characters and changes of direction made visible. */
export function visible(text) {
  return String(text).replace(CONTROL, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** Return a number in about four digits. */
export function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (Number.isInteger(value)) return String(value);
  return value.toPrecision(size >= 100 ? 4 : 3);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  return clock(value);
}

/** Return 1:05 or 2:03:04. */
export function clock(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const whole = Math.floor(value);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value.toPrecision(value >= 100 || at === 0 ? 3 : 2)} ${units[at]}`;
}

/** Return the local time of seconds since 1970. */
export function moment(value, withDay = false) {
  if (!value) return "–";
  const time = new Date(value * 1000);
  const text = time.toLocaleTimeString("en-GB");
  return withDay ? `${time.toLocaleDateString("en-CA")} ${text}` : text;
}

export function card(title, ...children) {
  return h("section", { class: "card" }, h("h2", {}, title), ...children);
}

/** A table with headings; `numbers` are the positions of columns of numbers. */
export function table(label, headings, rows, numbers = []) {
  const cell = (tag, value, at, extra = {}) => h(tag, { class: numbers.includes(at) ? "n" : "", ...extra }, value);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", {},
      h("thead", {}, h("tr", {}, headings.map((one, at) => cell("th", one, at, { scope: "col" })))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((one, at) => cell("td", one, at)))))));
}

/** Buttons of which one is chosen. */
export function choice(label, options, chosen, onchoose) {
  const group = h("div", { class: "choice", role: "group", "aria-label": label });
  const show = (value) => replace(group, options.map(([key, text]) => h("button", {
    type: "button", "aria-pressed": key === value ? "true" : "false",
    onclick: () => { show(key); onchoose(key); },
  }, text)));
  show(chosen);
  return group;
}
