/** The latest steps as bars: height is time, the two parts are prompt and decode tokens, the dots below the lease left. */

import { drawing, element, write } from "../parts/dom.js";

/** Executor, number, rows, prompt tokens, decode tokens, microseconds, lease left. @typedef {[string, number, number, number, number, number, number]} Step */

const BARS = 96;
const HEIGHT = 96;
const WIDTH = 8;

export class StepsStrip extends HTMLElement {
  /** @type {Step[]} */
  steps = [];

  connectedCallback() {
    if (this.svg) return;
    this.bars = Array.from({ length: BARS }, (_, index) => {
      const x = index * WIDTH;
      const title = drawing("title");
      const decode = drawing("rect", { x, width: WIDTH - 2, class: "decode" });
      const prompt = drawing("rect", { x, width: WIDTH - 2, class: "prompt" });
      const lease = drawing("rect", { x, y: HEIGHT + 6, width: WIDTH - 2, height: 4, class: "lease", opacity: 0 });
      return { title, decode, prompt, lease, group: drawing("g", {}, title, decode, prompt, lease) };
    });
    this.svg = drawing(
      "svg", { viewBox: `0 0 ${BARS * WIDTH} ${HEIGHT + 12}`, role: "img", "aria-label": "Latest steps", preserveAspectRatio: "none" },
      ...this.bars.map((bar) => bar.group),
    );
    this.summary = element("p", { class: "figure" }, "no step has run");
    this.replaceChildren(this.summary, this.svg, element(
      "p", { class: "legend" }, element("span", { class: "key decode" }, "decode tokens"), element("span", { class: "key prompt" }, "prompt tokens"), element("span", { class: "key lease" }, "lease left"),
    ));
  }

  /** @param {Step[]} steps New steps, oldest first. */
  add(steps) {
    this.steps = [...this.steps, ...steps].slice(-BARS);
    const longest = Math.max(...this.steps.map((step) => step[5]), 1);
    const offset = BARS - this.steps.length;
    for (const [index, bar] of (this.bars ?? []).entries()) {
      const step = this.steps[index - offset];
      if (!step) continue;
      const [, number, rows, promptTokens, decodeTokens, microseconds, leaseLeft] = step;
      const height = Math.max((microseconds / longest) * HEIGHT, 1);
      const share = promptTokens / Math.max(promptTokens + decodeTokens, 1);
      place(bar.prompt, HEIGHT - height, height * share);
      place(bar.decode, HEIGHT - height * (1 - share), height * (1 - share));
      bar.lease.setAttribute("opacity", String(Math.min(1, 0.15 + leaseLeft / 8)));
      write(bar.title, `step ${number}: ${rows} rows, ${promptTokens} prompt and ${decodeTokens} decode tokens, ${(microseconds / 1000).toFixed(2)} ms, lease left ${leaseLeft} steps`);
    }
    const last = this.steps.at(-1);
    if (last && this.summary && this.svg) {
      const mean = this.steps.reduce((sum, step) => sum + step[5], 0) / this.steps.length / 1000;
      write(this.summary, `${last[2]} ${last[2] === 1 ? "row" : "rows"}, ${(last[5] / 1000).toFixed(1)} ms, mean ${mean.toFixed(1)} ms, lease left ${last[6]} steps`);
      this.svg.setAttribute("aria-label", `Latest ${this.steps.length} steps: mean ${mean.toFixed(1)} ms, longest ${(longest / 1000).toFixed(1)} ms`);
    }
  }
}

/**
 * @param {SVGRectElement} bar
 * @param {number} y
 * @param {number} height
 */
function place(bar, y, height) {
  bar.setAttribute("y", y.toFixed(1));
  bar.setAttribute("height", height.toFixed(1));
}

customElements.define("pw-steps", StepsStrip);
