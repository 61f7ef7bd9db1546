/** The pipeline at work: services, steps, blocks, requests, and curves of the last ten minutes. */

import { element, write } from "../parts/dom.js";
import { BlockMap } from "./block_map.js";
import { Curves } from "./curves.js";
import { Feed } from "./feed.js";
import { RequestTable } from "./request_table.js";
import { Stages } from "./stages.js";
import { StepsStrip } from "./steps_strip.js";

export class Pipeline extends HTMLElement {
  stages = new Stages();
  steps = new StepsStrip();
  blocks = new BlockMap();
  curves = new Curves();
  requests = new RequestTable();
  problem = element("p", { class: "problem", role: "alert" });
  now = 0;
  feed = new Feed((event) => this.take(event), (state, faults) => this.onstate(state, faults));

  connectedCallback() {
    if (!this.firstChild) {
      this.setAttribute("tabindex", "0");
      this.append(
        this.problem,
        section("Services", this.stages),
        this.figures = element("div", { class: "pair" }, section("Steps", this.steps), section("KV blocks", this.blocks)),
        this.rates = section("Last ten minutes", this.curves),
        section("Requests", this.requests),
      );
    }
    this.feed.open();
  }

  disconnectedCallback() {
    this.feed.close();
  }

  restart() {
    if (this.isConnected) this.feed.restart();
  }

  /** @param {string} id Empty: none. */
  showRequest(id) {
    if (id !== this.requests.currentId || id) void this.requests.open(id);
  }

  /** @param {string} state @param {boolean} faults */
  onstate(state, faults) {
    write(this.problem, state);
    this.toggleAttribute("data-stale", Boolean(state));
    if (!state) {
      this.stages.faults = faults;
      this.curves.clear();
      this.requests.clear();
    }
  }

  /** @param {any} event */
  take(event) {
    this.now = event.now ?? this.now;
    if (event.services) {
      const schedulers = event.services.filter((/** @type {any} */ each) => each.service === "scheduler" && each.load);
      // A tenant does not see the load of all tenants.
      const hides = event.services.every((/** @type {any} */ each) => !each.load);
      for (const part of [this.figures, this.rates]) if (part) part.hidden = hides;
      this.stages.show(event.services, event.ended ?? this.stages.ended, this.now);
      this.blocks.show(schedulers.map((/** @type {any} */ each) => each.load));
    }
    if (event.steps) this.steps.add(event.steps);
    if (event.history) this.curves.add(event.history);
    if (event.sample) this.curves.add([event.sample]);
    if (event.requests) this.requests.update(event.requests);
  }
}

/**
 * @param {string} title
 * @param {HTMLElement} content
 */
function section(title, content) {
  return element("section", { "aria-label": title }, element("h2", {}, title), content);
}

customElements.define("pw-pipeline", Pipeline);
