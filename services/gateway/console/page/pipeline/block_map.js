/** The KV blocks of a scheduler as cells: shared, held by one sequence, cached for later prompts, and blank. */

import { drawing, element, write } from "../parts/dom.js";

const CELLS = 240;
const COLUMNS = 24;
const SIZE = 12;
const KINDS = /** @type {const} */ (["shared", "held", "cached", "blank"]);
const MEANINGS = {
  shared: "read by several sequences", held: "of one sequence", cached: "free, with the content of ended sequences", blank: "free and never used",
};

export class BlockMap extends HTMLElement {
  connectedCallback() {
    if (this.svg) return;
    this.cells = Array.from({ length: CELLS }, (_, index) => drawing("rect", {
      x: (index % COLUMNS) * SIZE + 1, y: Math.floor(index / COLUMNS) * SIZE + 1, width: SIZE - 2, height: SIZE - 2, rx: 2, class: "blank",
    }));
    this.svg = drawing("svg", { viewBox: `0 0 ${COLUMNS * SIZE} ${(CELLS / COLUMNS) * SIZE}`, role: "img", "aria-label": "KV blocks" }, ...this.cells);
    this.summary = element("p", { class: "figure" }, "no scheduler has blocks");
    this.legend = element("p", { class: "legend" }, ...KINDS.map((kind) => element("span", { class: `key ${kind}`, title: MEANINGS[kind] }, kind)));
    this.replaceChildren(this.summary, this.svg, this.legend);
  }

  /** @param {Record<string, number>[]} loads Loads of the schedulers. */
  show(loads) {
    const counts = countBlocks(loads);
    if (!counts.total || !this.cells || !this.summary || !this.svg) return;
    let index = 0;
    for (const kind of KINDS) {
      const cells = cellsOf(counts[kind], counts.total);
      for (const end = Math.min(index + cells, CELLS); index < end; index += 1) this.cells[index].setAttribute("class", kind);
    }
    for (; index < CELLS; index += 1) this.cells[index].setAttribute("class", "blank");
    const text = KINDS.map((kind) => `${counts[kind]} ${kind}`).join(", ");
    write(this.summary, `${counts.total} blocks`);
    for (const [at, kind] of KINDS.entries()) write(/** @type {Node} */ (this.legend?.children[at]), `${kind} ${counts[kind]}`);
    this.svg.setAttribute("aria-label", `${counts.total} KV blocks: ${text}`);
  }
}

/**
 * Adds up the blocks of several schedulers.
 *
 * @param {Record<string, number>[]} loads
 */
export function countBlocks(loads) {
  /** @param {string} name */
  const sum = (name) => loads.reduce((total, load) => total + (load[name] ?? 0), 0);
  const total = sum("blocks");
  const used = sum("blocks_held");
  const shared = sum("blocks_shared");
  const blank = sum("blocks_blank");
  return { total, shared, held: used - shared, cached: Math.max(total - used - blank, 0), blank };
}

/**
 * Returns the cells of a number of blocks: at least one, so that few blocks are seen.
 *
 * @param {number} count
 * @param {number} total
 */
export function cellsOf(count, total) {
  return count ? Math.max(1, Math.round((count / total) * CELLS)) : 0;
}

customElements.define("pw-blocks", BlockMap);
