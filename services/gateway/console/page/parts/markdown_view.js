/** Shows Markdown that grows: blocks that are complete stay, and only the ones behind them are built again. */

import { element } from "./dom.js";
import { blocks, spans } from "./markdown.js";

/** @typedef {import("./markdown.js").Block} Block */
/** @typedef {import("./markdown.js").Item} Item */

const TAGS = /** @type {const} */ ({ code: "code", strong: "strong", emphasis: "em", deleted: "del" });

/** The nodes of a Markdown text in a container. */
export class MarkdownView {
  /** @param {HTMLElement} container */
  constructor(container) {
    this.container = container;
    this.text = "";
    /** Position in the text of the first block that may still change. */
    this.open = 0;
    /** Nodes of that block and of the blocks behind it.
     * @type {HTMLElement[]} */
    this.growing = [];
  }

  /** @param {string} text */
  show(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text)) {
      this.container.replaceChildren();
      this.open = 0;
      this.growing = [];
    }
    this.text = text;
    const tail = text.slice(this.open);
    const parts = blocks(tail);
    for (const node of this.growing) node.remove();
    const nodes = parts.map(nodeOf);
    this.container.append(...nodes);
    // The last line may become another kind of line, and may make the line before it the head of a table.
    const certain = tail.lastIndexOf("\n", tail.lastIndexOf("\n") - 1) + 1;
    const first = Math.max(0, parts.findLastIndex((part) => part.begin < certain));
    this.open += parts[first]?.begin ?? 0;
    this.growing = nodes.slice(first);
  }
}

/**
 * @param {Block} block
 * @returns {HTMLElement}
 */
function nodeOf(block) {
  switch (block.kind) {
    case "heading":
      // The page has headings of its own above those of answers.
      return element("p", { class: `heading level-${block.level}`, role: "heading", "aria-level": Math.min(block.level + 2, 6) }, ...inline(block.text));
    case "code":
      return codeNode(block.language, block.text);
    case "list":
      return listNode(block.items);
    case "table":
      return tableNode(block.head, block.rows);
    case "quote":
      return element("blockquote", {}, ...inline(block.text));
    case "rule":
      return element("hr");
    default:
      return element("p", {}, ...inline(block.text));
  }
}

/**
 * @param {string} text
 * @returns {(Node | string)[]}
 */
function inline(text) {
  return spans(text).map((span) => (span.kind === "text" ? span.text : element(TAGS[span.kind], {}, span.text)));
}

/**
 * @param {string} language
 * @param {string} text
 */
function codeNode(language, text) {
  const label = language ? `code in ${language}` : "code";
  const pre = element("pre", { tabindex: "0", role: "group", "aria-label": label }, element("code", {}, text.replace(/\n$/, "")));
  const copy = element("button", { type: "button", class: "quiet copy" }, "Copy");
  copy.addEventListener("click", () => void navigator.clipboard.writeText(text).then(() => (copy.textContent = "Copied")));
  return element("div", { class: "code" }, element("div", { class: "code-head" }, element("span", {}, language || "code"), copy), pre);
}

/**
 * Nests the items of a list by their depth.
 *
 * @param {Item[]} items
 * @returns {HTMLElement}
 */
function listNode(items) {
  /** @type {{depth: number, node: HTMLElement}[]} */
  const open = [];
  /** @type {HTMLElement | null} */
  let root = null;
  for (const item of items) {
    while (open.length > 1 && item.depth < open[open.length - 1].depth) open.pop();
    const deepest = open.at(-1);
    if (!deepest || (item.depth > deepest.depth + 1 && open.length < 8)) {
      const node = element(item.ordered ? "ol" : "ul", item.ordered && item.number !== 1 ? { start: item.number } : {});
      (deepest?.node.lastElementChild ?? deepest?.node)?.append(node);
      root ??= node;
      open.push({ depth: item.depth, node });
    }
    open[open.length - 1].node.append(element("li", {}, ...inline(item.text)));
  }
  return root ?? element("ul");
}

/**
 * @param {string[]} head
 * @param {string[][]} rows
 */
function tableNode(head, rows) {
  const columns = head.map((_, index) => index);
  return element(
    "div",
    { class: "table", tabindex: "0", role: "group", "aria-label": "table" },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...head.map((cell) => element("th", {}, ...inline(cell))))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...columns.map((i) => element("td", {}, ...inline(row[i] ?? "")))))),
    ),
  );
}
