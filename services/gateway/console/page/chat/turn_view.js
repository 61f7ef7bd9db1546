/** One turn of a conversation: its text, its figures, and what can be done with it. */

import { button, element, write } from "../parts/dom.js";
import { MarkdownView } from "../parts/markdown_view.js";
import { TokensView } from "./tokens_view.js";

/** @typedef {import("./conversation.js").Turn} Turn */
/**
 * @typedef {object} Actions
 * @property {(turn: Turn, text: string) => void} edit
 * @property {(turn: Turn) => void} regenerate
 * @property {(turn: Turn) => void} choose
 * @property {(turn: Turn, results: string[]) => void} answerCalls
 */

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

export class TurnView extends HTMLElement {
  /** @type {Turn | null} */
  turn = null;
  showsTokens = false;

  /**
   * @param {Turn} turn
   * @param {Turn[]} siblings
   * @param {Actions} actions
   * @param {{completion: boolean, last: boolean}} place
   */
  show(turn, siblings, actions, place) {
    this.turn = turn;
    this.siblings = siblings;
    this.actions = actions;
    this.place = place;
    this.className = `turn ${turn.role}`;
    const name = place.completion ? { user: "Prompt", assistant: "Completion", tool: "" }[turn.role] : NAMES[turn.role];
    this.setAttribute("role", "article");
    this.setAttribute("aria-label", name);
    this.body = element("div", { class: "text" });
    this.reasoning = element("div", { class: "reasoning-text" });
    this.thoughts = element("details", { class: "reasoning", hidden: true }, element("summary", {}, "Reasoning"), this.reasoning);
    this.callList = element("div", { class: "calls" });
    this.problem = element("p", { class: "problem", role: "alert" });
    this.figures = element("p", { class: "figures" });
    this.tools = element("div", { class: "actions" });
    this.markdown = turn.role === "assistant" && !place.completion ? new MarkdownView(this.body) : null;
    this.replaceChildren(
      element("h2", {}, name), this.thoughts, this.body, this.callList, this.problem,
      element("footer", {}, this.tools, this.figures),
    );
    this.update();
    this.finish();
  }

  /** Shows what has been added to the turn. */
  update() {
    const turn = this.turn;
    if (!turn || !this.body || !this.reasoning || !this.thoughts) return;
    this.setAttribute("aria-busy", String(turn.role === "assistant" && !turn.end));
    if (this.showsTokens && turn.tokens.length) return;
    if (this.markdown) this.markdown.show(turn.text);
    else write(this.body, turn.text);
    this.thoughts.hidden = !turn.reasoning;
    write(this.reasoning, turn.reasoning);
  }

  /** Shows what is known once the turn is complete. */
  finish() {
    const { turn, siblings = [], actions } = this;
    if (!turn || !actions || !this.tools || !this.problem || !this.figures) return;
    this.update();
    write(this.problem, turn.error);
    this.showCalls();
    const done = turn.role !== "assistant" || Boolean(turn.end);
    this.tools.replaceChildren();
    if (siblings.length > 1) this.tools.append(this.branches(siblings));
    if (!done) return;
    if (turn.role === "user") this.tools.append(button("Edit", () => this.edit(), { class: "quiet small" }));
    if (turn.text) this.tools.append(copyButton("Copy", () => turn.text));
    if (turn.role === "assistant") {
      const label = turn.error ? "Try again" : "Regenerate";
      this.tools.append(button(label, () => actions.regenerate(turn), { class: "quiet small" }));
      if (turn.tokens.length) {
        this.tools.append(button("Tokens", () => this.toggleTokens(), { class: "quiet small", "aria-pressed": this.showsTokens }));
      }
      this.figures.replaceChildren(...figuresOf(turn));
    }
  }

  /** @param {Turn[]} siblings */
  branches(siblings) {
    const turn = /** @type {Turn} */ (this.turn);
    const at = siblings.findIndex((other) => other.id === turn.id);
    /** @param {string} label @param {number} step @param {string} sign */
    const move = (label, step, sign) => button(sign, () => this.actions?.choose(siblings[at + step]), {
      class: "quiet small", "aria-label": label, disabled: !siblings[at + step],
    });
    return element(
      "span", { class: "branches", role: "group", "aria-label": "Branches" },
      move("Previous branch", -1, "‹"), `${at + 1} / ${siblings.length}`, move("Next branch", 1, "›"),
    );
  }

  edit() {
    const { turn, actions, body } = this;
    if (!turn || !actions || !body) return;
    const input = element("textarea", { "aria-label": "Edited text", rows: Math.min(12, turn.text.split("\n").length + 1) });
    input.value = turn.text;
    const close = () => this.show(turn, this.siblings ?? [], actions, /** @type {any} */ (this.place));
    const save = () => (input.value.trim() ? actions.edit(turn, input.value) : close());
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
      event.stopPropagation();
    });
    body.replaceChildren(input, element(
      "div", { class: "actions" }, button("Send as a branch", save, { class: "main small" }), button("Cancel", close, { class: "quiet small" }),
    ));
    input.focus();
  }

  toggleTokens() {
    const { turn, body } = this;
    if (!turn || !body) return;
    this.showsTokens = !this.showsTokens;
    body.replaceChildren();
    if (this.showsTokens) {
      const tokens = new TokensView();
      tokens.show(turn.tokens);
      body.append(tokens);
    } else if (this.markdown) {
      this.markdown = new MarkdownView(body);
    }
    this.finish();
  }

  showCalls() {
    const { turn, actions, place } = this;
    if (!turn || !actions || !this.callList) return;
    const open = place?.last && turn.end && turn.calls.length > 0;
    /** @type {HTMLTextAreaElement[]} */
    const results = [];
    const cards = turn.calls.map((call) => {
      const card = element("div", { class: "call" }, element("p", {}, "Calls ", element("code", {}, call.name)), element("pre", { tabindex: "0", role: "group", "aria-label": `arguments of ${call.name}` }, indented(call.arguments)));
      if (open) {
        const result = element("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "The result that the tool returns" });
        results.push(result);
        card.append(result);
      }
      return card;
    });
    this.callList.replaceChildren(...cards);
    if (open) {
      this.callList.append(button("Send results", () => actions.answerCalls(turn, results.map((each) => each.value)), { class: "main small" }));
    }
  }
}

/**
 * @param {string} label
 * @param {() => string} text
 */
export function copyButton(label, text) {
  const copy = button(label, () => {
    void navigator.clipboard.writeText(text()).then(() => (copy.textContent = "Copied"), () => (copy.textContent = "Not allowed"));
    setTimeout(() => (copy.textContent = label), 1500);
  }, { class: "quiet small" });
  return copy;
}

/**
 * @param {Turn} turn
 * @returns {(Node | string)[]}
 */
function figuresOf(turn) {
  const { firstTokenMs, tokens, tokensPerSecond, promptTokens, cachedTokens } = turn.figures;
  const parts = [];
  if (firstTokenMs !== undefined) parts.push(`${Math.round(firstTokenMs)} ms to the first token`);
  if (tokens !== undefined) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  if (tokensPerSecond !== undefined) parts.push(`${tokensPerSecond.toFixed(1)} tokens/s`);
  if (promptTokens !== undefined) parts.push(`prompt ${promptTokens}${cachedTokens ? `, ${cachedTokens} cached` : ""}`);
  if (turn.end === "length") parts.push("cut at the limit of tokens");
  if (turn.end === "stopped") parts.push("stopped");
  /** @type {(Node | string)[]} */
  const nodes = [parts.join(" · ")];
  if (turn.requestId) nodes.push(" ", element("a", { href: `#/requests/${encodeURIComponent(turn.requestId)}` }, "Waterfall"));
  return nodes;
}

/** @param {string} text JSON as a model writes it. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

customElements.define("pw-turn", TurnView);
