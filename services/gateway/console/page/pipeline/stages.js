/** The picture of the services: a column per stage, in the order in which a request passes them, a card per instance. */

import { button, element, write } from "../parts/dom.js";
import { send } from "../parts/server.js";

/** @typedef {{service: string, instance: string, ready: boolean, draining: boolean, model?: string, term?: number, step?: number, load?: Record<string, number>}} Instance */

/** Services and what they do, in the order of a request. */
const STAGES = /** @type {const} */ ({
  gateway: "HTTP to the pipeline",
  tokenizer: "text to tokens",
  scheduler: "slots, blocks, plans",
  executor: "runs the steps",
  detokenizer: "tokens to text",
});
const FAULTS = ["kill", "freeze", "drain"];
/** Seconds for which an instance without heartbeats is shown as silent. */
const SHOWN_SILENT = 8;

/** Figures of each service: name in the heartbeat, and label. @type {Record<string, [string, string][]>} */
const FIGURES = {
  gateway: [["running", "requests"], ["connections", "connections"], ["requests", "served"]],
  tokenizer: [["in_flight", "in flight"]],
  scheduler: [["running", "running"], ["waiting", "waiting"], ["queued", "in the queue"], ["preemptions", "preemptions"]],
  executor: [["num_slots", "slots in use"], ["steps", "steps"], ["sampled", "tokens"]],
  detokenizer: [["streams", "streams"]],
};

export class Stages extends HTMLElement {
  /** @type {Map<string, {instance: Instance, seen: number}>} */
  known = new Map();
  /** @type {[number, string, string][]} */
  ended = [];
  faults = false;

  connectedCallback() {
    if (this.columns) return;
    this.columns = Object.fromEntries(Object.entries(STAGES).map(([service, task]) => {
      const cards = element("ul", { class: "instances" });
      const restarts = element("span", { class: "restarts" });
      const column = element("li", { class: "stage" }, element("h3", {}, service, " ", restarts), element("p", { class: "meaning" }, task), cards);
      return [service, { column, cards, restarts }];
    }));
    this.problem = element("p", { class: "problem", role: "alert" });
    this.replaceChildren(element("ol", { class: "stages" }, ...Object.values(this.columns).map(({ column }) => column)), this.problem);
  }

  /**
   * @param {Instance[]} instances The live ones.
   * @param {[number, string, string][]} ended Time, service and instance of processes that have ended.
   * @param {number} now Unix time in seconds.
   */
  show(instances, ended, now) {
    this.ended = ended;
    for (const instance of instances) this.known.set(instance.instance, { instance, seen: now });
    const gone = new Set(ended.map(([, , id]) => id));
    for (const [id, { seen }] of this.known) {
      if (gone.has(id) || now - seen > SHOWN_SILENT) this.known.delete(id);
    }
    for (const [service, { cards, restarts }] of Object.entries(this.columns ?? {})) {
      const ends = ended.filter(([, name]) => name === service);
      write(restarts, ends.length ? `${ends.length} ${ends.length === 1 ? "restart" : "restarts"}` : "");
      const here = [...this.known.values()].filter(({ instance }) => instance.service === service);
      const old = new Map([...cards.children].map((card) => [/** @type {HTMLElement} */ (card).dataset.id, card]));
      const nodes = here.map(({ instance, seen }) => {
        const card = /** @type {HTMLElement} */ (old.get(instance.instance) ?? this.card(instance));
        fill(card, instance, now - seen);
        return card;
      });
      if (!nodes.length) nodes.push(element("li", { class: "instance missing" }, "none is running"));
      if (nodes.length !== cards.children.length || nodes.some((node, index) => node !== cards.children[index])) cards.replaceChildren(...nodes);
    }
  }

  /** @param {Instance} instance */
  card(instance) {
    const faults = element("div", { class: "faults", role: "group", "aria-label": `Faults of ${instance.service} ${instance.instance}` }, ...FAULTS.map((fault) => (
      button(fault, () => void this.cause(instance.instance, fault), { class: "quiet small", "aria-label": `${fault} ${instance.service} ${instance.instance}` })
    )));
    return element(
      "li", { class: "instance", "data-id": instance.instance },
      element("p", { class: "instance-head" }, element("span", { class: "state" }), element("code", { title: instance.instance }, instance.instance.slice(0, 6))),
      element("dl", {}),
      this.faults && faults,
    );
  }

  /** @param {string} instance @param {string} fault */
  async cause(instance, fault) {
    if (!this.problem) return;
    this.problem.textContent = "";
    try {
      await send("/console/faults", { body: { instance, fault } });
    } catch (error) {
      this.problem.textContent = /** @type {Error} */ (error).message;
    }
  }
}

/**
 * @param {HTMLElement} card
 * @param {Instance} instance
 * @param {number} silence Seconds since the instance was seen.
 */
function fill(card, instance, silence) {
  const state = silence > 2.5 ? "silent" : instance.draining ? "draining" : instance.ready ? "ready" : "not ready";
  card.dataset.state = state.replace(" ", "-");
  write(/** @type {Node} */ (card.querySelector(".state")), state);
  const list = /** @type {HTMLElement} */ (card.querySelector("dl"));
  const load = instance.load ?? {};
  const rows = (FIGURES[instance.service] ?? []).filter(([name]) => name in load);
  if (list.children.length !== rows.length) {
    list.replaceChildren(...rows.map(([, label]) => element("div", {}, element("dt", {}, label), element("dd"))));
  }
  for (const [index, [name]] of rows.entries()) {
    write(/** @type {Node} */ (list.children[index].lastElementChild), compact(load[name]));
  }
}

/** @param {number} value */
export function compact(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value % 1 ? value.toFixed(1) : String(value);
}

customElements.define("pw-stages", Stages);
