/** The latest requests, and the waterfall of the one that the address names. */

import { element, write } from "../parts/dom.js";
import { send } from "../parts/server.js";
import { Waterfall } from "./waterfall.js";

/** @typedef {{id: string, tenant: string, path: string, model: string, status: number, began: number, first: number, ended: number, prompt: number, cached: number, tokens: number}} Row */

const MOST = 500;
const COLUMNS = ["Request", "State", "Path", "Model", "Prompt", "Tokens", "First token", "Time"];

export class RequestTable extends HTMLElement {
  /** @type {Map<string, {row: Row, node: HTMLTableRowElement}>} */
  rows = new Map();
  /** Id of the request whose waterfall is drawn; empty: none. */
  currentId = "";

  connectedCallback() {
    if (this.body) return;
    this.body = element("tbody");
    this.waterfall = new Waterfall();
    this.empty = element("p", { class: "meaning" }, "No request yet: the next ones appear here, without their texts.");
    this.replaceChildren(
      this.waterfall, this.empty,
      element("div", { class: "table requests", tabindex: "0", role: "group", "aria-label": "Rows of the requests" }, element("table", {}, element("thead", {}, element("tr", {}, ...COLUMNS.map((name) => element("th", { scope: "col" }, name)))), this.body)),
    );
  }

  /** @param {Row[]} rows New and changed ones, oldest change first. */
  update(rows) {
    if (!this.body || !this.empty) return;
    for (const row of rows) {
      const entry = this.rows.get(row.id);
      const node = entry?.node ?? this.line(row.id);
      this.rows.set(row.id, { row, node });
      fill(node, row);
      if (!entry) this.body.prepend(node);
      if (row.id === this.currentId && row.ended && !entry?.row.ended) void this.open(row.id);
    }
    while (this.body.children.length > MOST) {
      const last = /** @type {HTMLElement} */ (this.body.lastElementChild);
      this.rows.delete(last.dataset.id ?? "");
      last.remove();
    }
    this.empty.hidden = this.rows.size > 0;
  }

  clear() {
    this.rows.clear();
    this.body?.replaceChildren();
  }

  /** @param {string} id */
  line(id) {
    return element(
      "tr", { "data-id": id, "aria-current": id === this.currentId ? "true" : false },
      element("td", {}, element("a", { href: `#/requests/${encodeURIComponent(id)}` }, id)), ...COLUMNS.slice(1).map(() => element("td")),
    );
  }

  /**
   * Shows the waterfall of a request; with an empty id, none.
   *
   * @param {string} id
   */
  async open(id) {
    this.currentId = id;
    for (const { row, node } of this.rows.values()) {
      if (row.id === id) node.setAttribute("aria-current", "true");
      else node.removeAttribute("aria-current");
    }
    if (!id) return this.waterfall?.hide();
    try {
      const answer = await (await send(`/console/requests/${encodeURIComponent(id)}`)).json();
      if (id === this.currentId) this.waterfall?.show(id, answer.stages, answer.traced);
    } catch (error) {
      if (id === this.currentId) this.waterfall?.report(id, /** @type {Error} */ (error).message);
    }
    return undefined;
  }
}

/**
 * @param {HTMLTableRowElement} node
 * @param {Row} row
 */
function fill(node, row) {
  const state = row.ended ? (row.status === 200 ? "done" : row.status === 499 ? "client gone" : `error ${row.status}`) : "running";
  node.dataset.state = state.split(" ")[0];
  const texts = [
    row.tenant ? `${state}, ${row.tenant}` : state, row.path, row.model,
    row.cached ? `${row.prompt} (${row.cached} cached)` : String(row.prompt), String(row.tokens),
    row.first ? milliseconds(row.first - row.began) : "", row.ended ? milliseconds(row.ended - row.began) : "",
  ];
  for (const [index, text] of texts.entries()) write(node.children[index + 1], text);
}

/** @param {number} seconds */
function milliseconds(seconds) {
  return seconds < 10 ? `${(seconds * 1000).toFixed(0)} ms` : `${seconds.toFixed(1)} s`;
}

customElements.define("pw-requests", RequestTable);
