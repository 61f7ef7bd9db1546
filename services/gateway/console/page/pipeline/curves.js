/** Curves of the last ten minutes. */

import { drawing, element, write } from "../parts/dom.js";
import { compact } from "./stages.js";

/** @typedef {{at: number, tokens: number, prompt_tokens: number, running: number, waiting: number, first_token_ms: [number, number] | null, next_token_ms: [number, number] | null}} Sample */

const SPAN = 600;
const WIDTH = 300;
const HEIGHT = 72;

/** Each curve: title, unit, names of its two lines, and their values. @type {[string, string, string[], (sample: Sample) => (number | undefined)[]][]} */
const CURVES = [
  ["Tokens", "tokens/s", ["generated", "of prompts"], (sample) => [sample.tokens, sample.prompt_tokens]],
  ["Requests", "", ["running", "waiting"], (sample) => [sample.running, sample.waiting]],
  ["First token", "ms", ["median", "95 %"], (sample) => sample.first_token_ms ?? []],
  ["Next token", "ms", ["median", "95 %"], (sample) => sample.next_token_ms ?? []],
];

export class Curves extends HTMLElement {
  /** @type {Sample[]} */
  samples = [];

  connectedCallback() {
    if (this.plots) return;
    this.plots = CURVES.map(([title, , names]) => {
      const lines = [0, 1].map((index) => drawing("path", { class: `line line-${index}`, fill: "none" }));
      const svg = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title }, ...lines.toReversed());
      const value = element("p", { class: "figure" });
      const top = element("span", { class: "top" });
      const node = element(
        "div", { class: "curve" }, element("h3", {}, title), value, element("div", { class: "plot" }, top, svg),
        element("p", { class: "legend" }, ...names.map((name, index) => element("span", { class: `key line-${index}` }, name))),
      );
      return { lines, svg, value, top, node };
    });
    this.replaceChildren(...this.plots.map((plot) => plot.node));
    this.draw();
  }

  /** @param {Sample[]} samples */
  add(samples) {
    this.samples = [...this.samples, ...samples].slice(-SPAN / 5);
    this.draw();
  }

  clear() {
    this.samples = [];
  }

  draw() {
    const now = this.samples.at(-1)?.at ?? 0;
    for (const [index, plot] of (this.plots ?? []).entries()) {
      const [title, unit, names, valuesOf] = CURVES[index];
      const values = this.samples.map((sample) => ({ x: WIDTH * (1 - (now - sample.at) / SPAN), values: valuesOf(sample) }));
      const highest = Math.max(...values.flatMap((each) => each.values.map((value) => value ?? 0)), 1e-9);
      for (const [at, line] of plot.lines.entries()) line.setAttribute("d", path(values.map(({ x, values: all }) => [x, all[at]]), highest));
      const last = values.findLast((each) => each.values.length);
      const figures = last ? `${names.map((name, at) => `${name} ${compact(last.values[at] ?? 0)}`).join(", ")} ${unit}` : "none yet";
      write(plot.value, figures);
      write(plot.top, highest > 1e-9 ? compact(highest) : "");
      plot.svg.setAttribute("aria-label", `${title} in the last ten minutes: ${figures}`);
    }
  }
}

/**
 * Returns the path of a line with gaps where there is no value.
 *
 * @param {[number, number | undefined][]} points
 * @param {number} highest
 */
export function path(points, highest) {
  let drawn = "";
  let pen = "M";
  for (const [x, value] of points) {
    if (value === undefined || x < 0) {
      pen = "M";
    } else {
      const y = HEIGHT - 2 - (value / highest) * (HEIGHT - 4);
      const dot = pen === "M" ? "m-1.5 0h3m-1.5 0" : ""; // else a value between two gaps has no length
      drawn += `${pen}${x.toFixed(1)} ${y.toFixed(1)}${dot}`;
      pen = "L";
    }
  }
  return drawn;
}

customElements.define("pw-curves", Curves);
