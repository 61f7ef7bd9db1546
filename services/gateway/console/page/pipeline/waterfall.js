/** The stages of one request as bars on a common scale, as `pagewire trace` draws them. */

import { element } from "../parts/dom.js";

/** @typedef {{name: string, service: string, start: number, end: number}} Stage */

export class Waterfall extends HTMLElement {
  connectedCallback() {
    this.hide();
  }

  hide() {
    this.hidden = true;
    this.replaceChildren();
  }

  /**
   * @param {string} id
   * @param {Stage[]} stages
   * @param {boolean} traced Whether they are spans of --trace-dir, and not the times of the last frame.
   */
  show(id, stages, traced) {
    if (!stages.length) return this.report(id, "It runs: its stages are shown when it has ended.");
    const begin = Math.min(...stages.map((stage) => stage.start));
    const whole = Math.max(...stages.map((stage) => stage.end)) - begin || 1e-9;
    const rows = stages.map((stage) => {
      const bar = element("span", { class: "span" });
      bar.style.marginLeft = `${((stage.start - begin) / whole) * 100}%`;
      bar.style.width = `${Math.max(((stage.end - stage.start) / whole) * 100, 0.4)}%`;
      const cells = [stage.name, stage.service, ms(stage.start - begin), ms(stage.end - stage.start)];
      return element("tr", {}, ...cells.map((cell) => element("td", {}, cell)), element("td", { class: "scale" }, bar));
    });
    const heads = ["Stage", "Service", "Start", "Time"].map((name) => element("th", { scope: "col" }, name));
    this.frame(id, [
      element("div", { class: "table", tabindex: "0", role: "group", "aria-label": `Waterfall of ${id}` }, element("table", {}, element("thead", {}, element("tr", {}, ...heads, element("td", {}))), element("tbody", {}, ...rows))),
      element("p", { class: "meaning" }, traced ? "All spans of the request." : "Times of the request's last frame. With --trace-dir every span is shown."),
    ]);
    return undefined;
  }

  /** @param {string} id @param {string} text */
  report(id, text) {
    this.frame(id, [element("p", {}, text)]);
  }

  /** @param {string} id @param {Node[]} content */
  frame(id, content) {
    this.hidden = false;
    const head = element("div", { class: "waterfall-head" }, element("h3", {}, "Request ", element("code", {}, id)), element("a", { href: "#/pipeline" }, "Close"));
    this.replaceChildren(head, ...content);
  }
}

/** @param {number} seconds */
function ms(seconds) {
  return `${(seconds * 1000).toFixed(1)} ms`;
}

customElements.define("pw-waterfall", Waterfall);
