// Line charts as SVG: bands from minimum to maximum, means, crosshair with values, and a range of x chosen by dragging.

import { h, s, figure, replace, visible } from "./dom.js";
import { later, never } from "./frames.js";

const MARGIN = { left: 52, right: 12, top: 8, bottom: 26 };
const HEIGHT = 210;
const FEW = 40; // Up to so many points are marked.

/** Return about `num` round numbers from `low` to `high`. */
export function ticks(low, high, num) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / Math.max(1, num);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((one) => one * power >= raw) * power;
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

/** Return the exponential moving mean of values, without the bias of its beginning; `window` 0 leaves them. */
export function smooth(values, window) {
  if (!(window > 1)) return values;
  const keep = 1 - 2 / (window + 1);
  let [mean, weight] = [0, 0];
  return values.map((value) => {
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
}

export class LineChart {
  /** `options`: title, unit, height, onrange(begin, end) for a chosen range of x, or with nothing for all of it. */
  constructor(options) {
    this.options = options;
    this.series = [];
    this.view = { xLabel: "step", window: 0, log: false, format: figure };
    this.values = h("div", { class: "legend" });
    this.svg = s("svg", { class: "plot", role: "img", tabindex: "0", "aria-label": options.title, height: options.height ?? HEIGHT });
    this.tip = h("div", { class: "tip", hidden: true });
    this.body = h("div", { class: "plotbox" }, this.svg, this.tip);
    this.element = h("figure", { class: "chart" },
      h("figcaption", {}, h("span", { class: "title" }, options.title),
        options.unit ? h("span", { class: "unit" }, options.unit) : null),
      this.values, this.body);
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", () => this.#leave());
    this.svg.addEventListener("pointerdown", (event) => this.#press(event));
    this.svg.addEventListener("pointerup", (event) => this.#release(event));
    this.svg.addEventListener("dblclick", () => options.onrange?.());
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    this.svg.addEventListener("blur", () => this.#leave());
    this.isVisible = false;
    this.drawn = null;
    this.paths = new WeakMap();
    // Told by the browser: asking for it while others are drawn would lay out the page again for each plot.
    this.width = 0;
    this.observer = new ResizeObserver((entries) => { this.width = Math.floor(entries.at(-1).contentRect.width); this.#due(); });
    this.observer.observe(this.body);
    // A plot that is scrolled out of sight is drawn when it comes into view.
    this.sight = new IntersectionObserver((entries) => { this.isVisible = entries.at(-1).isIntersecting; this.#due(); }, { rootMargin: "200px" });
    this.sight.observe(this.element);
  }

  /** `series`: name, colour (number), and x, low, mean, high of the same length. */
  set(series, view = {}) {
    this.series = series.filter((one) => one.x.length);
    Object.assign(this.view, view);
    this.#due();
  }

  close() {
    this.observer.disconnect();
    this.sight.disconnect();
    never(this);
  }

  #due() {
    if (this.isVisible && this.width) later(this, () => this.draw());
  }

  /** Return what the drawing follows from, except for the values, which `#isDrawn` compares by their arrays. */
  #inputs(width) {
    const { format, xText, ...view } = this.view;
    return JSON.stringify([width, view, this.series.map((one) => [one.name, one.colour, one.dashed, one.plain])]);
  }

  #isDrawn(inputs) {
    return this.drawn !== null && this.drawn.inputs === inputs && this.drawn.values.length === this.series.length
      && this.series.every((one, at) => one.mean === this.drawn.values[at]);
  }

  draw() {
    const width = Math.max(160, this.width);
    const inputs = this.#inputs(width);
    if (this.#isDrawn(inputs)) return;
    this.drawn = { inputs, values: this.series.map((one) => one.mean) };
    this.element.dataset.draws = Number(this.element.dataset.draws ?? 0) + 1;
    const height = this.options.height ?? HEIGHT;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("width", width);
    this.#label();
    if (!this.series.length) {
      this.scale = null;
      replace(this.svg, s("text", { class: "tick", x: width / 2, y: height / 2, "text-anchor": "middle" }, "no values yet"));
      return;
    }
    this.scale = this.#scale(width, height);
    this.marks = s("g", {});
    this.tip.hidden = true;
    replace(this.svg, ...this.#axes(width, height), ...this.series.flatMap((one) => this.#curve(one)), this.marks);
  }

  #label() {
    const last = this.series.map((one) => `${one.name} ${this.view.format(one.mean.at(-1))}`);
    this.svg.setAttribute("aria-label", visible(`${this.options.title}: ${last.join(", ") || "no values yet"}`));
    replace(this.values, this.series.map((one) => h("span", { class: "key" },
      h("i", { class: `c${one.colour} ${one.dashed ? "dashed" : ""}` }), h("span", {}, one.name), h("b", {}, this.view.format(one.mean.at(-1))))));
  }

  #scale(width, height) {
    const log = this.view.log && this.series.every((one) => one.low.every((value) => value > 0));
    const y = log ? Math.log10 : (value) => value;
    let [xLow, xHigh, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const one of this.series) {
      one.shown = this.#smoothed(one);
      for (let at = 0; at < one.x.length; at += 1) {
        if (one.x[at] < xLow) xLow = one.x[at];
        if (one.x[at] > xHigh) xHigh = one.x[at];
        if (one.low[at] < low) low = one.low[at];
        if (one.high[at] > high) high = one.high[at];
      }
    }
    const limits = this.view.range;
    if (limits) [xLow, xHigh] = limits;
    if (xHigh === xLow) xHigh = xLow + 1;
    [low, high] = [y(low), y(high)];
    const pad = (high - low || Math.abs(high) || 1) * 0.06;
    [low, high] = [low - pad, high + pad];
    const [inner, tall] = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
    return {
      xLow, xHigh, low, high, log, width, height, inner,
      x: (value) => MARGIN.left + ((value - xLow) / (xHigh - xLow)) * inner,
      y: (value) => MARGIN.top + tall - ((y(value) - low) / (high - low)) * tall,
      back: (pixel) => xLow + ((pixel - MARGIN.left) / inner) * (xHigh - xLow),
    };
  }

  #smoothed(one) {
    const { window } = this.view;
    if (!(window > 1) || one.plain || one.x.length <= FEW) return one.mean;
    const kept = this.paths.get(one.mean) ?? {};
    this.paths.set(one.mean, kept);
    if (kept.window !== window) Object.assign(kept, { window, smoothed: smooth(one.mean, window) });
    return kept.smoothed;
  }

  #axes(width, height) {
    const { xLow, xHigh, low, high, log, x } = this.scale;
    const found = [];
    for (const value of ticks(low, high, 4)) {
      const real = log ? 10 ** value : value;
      const at = this.scale.y(real);
      found.push(s("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at }));
      found.push(s("text", { class: "tick", x: MARGIN.left - 7, y: at + 4, "text-anchor": "end" }, this.view.format(real)));
    }
    const whole = this.view.xLabel === "step";
    for (const value of ticks(xLow, xHigh, Math.max(2, Math.floor(width / 85)))) {
      if (whole && !Number.isInteger(value)) continue;
      const text = whole ? value.toLocaleString("en") : this.view.xText?.(value) ?? figure(value);
      const isLast = x(value) > width - 36;
      found.push(s("text", { class: "tick", x: isLast ? width - 4 : x(value), y: height - 8, "text-anchor": isLast ? "end" : "middle" }, text));
    }
    return found;
  }

  #curve(one) {
    const { x, y } = this.scale;
    const num = one.x.length;
    const point = (values, at) => `${x(one.x[at]).toFixed(1)} ${y(values[at]).toFixed(1)}`;
    const join = (values) => Array.from({ length: num }, (_, at) => point(values, at)).join("L");
    const found = [];
    if (num > FEW && !one.plain) {
      const down = Array.from({ length: num }, (_, at) => point(one.low, num - 1 - at)).join("L");
      found.push(s("path", { class: `band c${one.colour}`, d: `M${join(one.high)}L${down}Z` }));
    }
    const isDense = num > (x(one.x[num - 1]) - x(one.x[0])) / 1.5; // Then the band says it, and a line would fill it.
    if (one.shown !== one.mean && !isDense) found.push(s("path", { class: `line faint c${one.colour}`, d: `M${join(one.mean)}` }));
    found.push(s("path", { class: `line c${one.colour} ${one.dashed ? "dashed" : ""}`, d: `M${join(one.shown)}` }));
    if (num <= FEW) {
      for (let at = 0; at < num; at += 1) {
        found.push(s("circle", { class: `dot c${one.colour}`, cx: x(one.x[at]), cy: y(one.shown[at]), r: 2.6 }));
      }
    }
    return found;
  }

  #position(event) {
    const box = this.svg.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * this.scale.width;
  }

  #point(event) {
    if (!this.scale) return;
    const { clientX } = event;
    later(this.tip, () => { if (this.scale) this.#show(this.#position({ clientX })); }, true);
  }

  #show(pixel) {
    const { xLow, xHigh, x, y, back, width, height } = this.scale;
    const wanted = Math.min(xHigh, Math.max(xLow, back(pixel)));
    this.cursor = pixel;
    const near = this.series.map((one) => [one, nearest(one.x, wanted)]);
    const [first, at] = near.reduce((best, one) => (
      Math.abs(one[0].x[one[1]] - wanted) < Math.abs(best[0].x[best[1]] - wanted) ? one : best));
    const place = x(first.x[at]);
    const marks = [s("line", { class: "cross", x1: place, x2: place, y1: MARGIN.top, y2: height - MARGIN.bottom })];
    if (this.pressed !== undefined) {
      const [from, to] = [Math.min(this.pressed, pixel), Math.max(this.pressed, pixel)];
      marks.push(s("rect", { class: "range", x: from, y: MARGIN.top, width: to - from, height: height - MARGIN.top - MARGIN.bottom }));
    }
    for (const [one, index] of near) {
      marks.push(s("circle", { class: `dot c${one.colour}`, cx: x(one.x[index]), cy: y(one.shown[index]), r: 3.5 }));
    }
    replace(this.marks, ...marks);
    const xText = this.view.xLabel === "step" ? `step ${Math.round(first.x[at]).toLocaleString("en")}` : this.view.xText?.(first.x[at]);
    replace(this.tip, h("div", { class: "tiphead" }, xText), near.map(([one, index]) => h("div", { class: "key" },
      h("i", { class: `c${one.colour}` }), h("span", {}, one.name), h("b", {}, this.view.format(one.mean[index])))));
    this.tip.hidden = false;
    const share = place / width;
    this.tip.style.setProperty("left", share < 0.5 ? `${share * 100 + 2}%` : "auto");
    this.tip.style.setProperty("right", share < 0.5 ? "auto" : `${(1 - share) * 100 + 2}%`);
  }

  #leave() {
    never(this.tip);
    this.tip.hidden = true;
    this.pressed = undefined;
    if (this.marks) replace(this.marks);
  }

  #press(event) {
    if (!this.scale || !this.options.onrange || event.pointerType === "touch" || event.button !== 0) return;
    this.pressed = this.#position(event);
    this.svg.setPointerCapture(event.pointerId);
  }

  #release(event) {
    if (this.pressed === undefined || !this.scale) return;
    const [from, to] = [this.pressed, this.#position(event)].sort((one, two) => one - two);
    this.pressed = undefined;
    if (to - from > 8) this.options.onrange(this.scale.back(from), this.scale.back(to));
  }

  #key(event) {
    if (!this.scale || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    const { x, xLow, xHigh, inner } = this.scale;
    if (event.key === "Escape") { this.options.onrange?.(); this.#leave(); return; }
    const step = (event.shiftKey ? 0.1 : 0.01) * inner;
    const at = this.cursor ?? x(xHigh);
    const moved = { ArrowLeft: at - step, ArrowRight: at + step, Home: x(xLow), End: x(xHigh) }[event.key];
    this.#show(Math.min(x(xHigh), Math.max(x(xLow), moved)));
  }
}

/** Return the position of the number in a rising array that is nearest to `wanted`. */
function nearest(xs, wanted) {
  let [low, high] = [0, xs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && Math.abs(xs[low - 1] - wanted) < Math.abs(xs[low] - wanted) ? low - 1 : low;
}
