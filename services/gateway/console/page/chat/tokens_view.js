/**
 * Shows the tokens of an answer, shaded by how unlikely they were and underlined where they were not sampled, with the
 * likeliest ones on hover or by arrow keys.
 */

import { element } from "../parts/dom.js";

/** @typedef {import("./conversation.js").Token} Token */

/** Probabilities below which a token is shaded more. */
const SHADES = [0.9, 0.6, 0.3, 0.1];

export class TokensView extends HTMLElement {
  /** @type {Token[]} */
  tokens = [];
  current = -1;

  connectedCallback() {
    this.setAttribute("tabindex", "0");
    this.setAttribute("role", "group");
    this.setAttribute("aria-label", "Tokens, how likely they were and how they came: move with the arrow keys");
    this.addEventListener("pointerover", (event) => this.point(event.target));
    this.addEventListener("pointerleave", () => this.select(-1));
    this.addEventListener("click", (event) => this.point(event.target));
    this.addEventListener("blur", () => this.select(-1));
    this.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step === undefined) {
        if (event.key === "Escape") this.select(-1);
        return;
      }
      event.preventDefault();
      this.select(Math.min(Math.max(this.current + step, 0), this.tokens.length - 1));
    });
  }

  /** @param {Token[]} tokens */
  show(tokens) {
    this.tokens = tokens;
    this.text = element("div", { class: "tokens" }, ...tokens.map((token, index) => element(
      "span", { class: `token shade-${shade(token.logprob)} ${token.origin ?? ""}`, "data-index": index }, token.text || "∅",
    )));
    const counts = ["drafted", "forced"].map((origin) => [origin, tokens.filter((token) => token.origin === origin).length]);
    this.legend = element("p", { class: "token-legend", hidden: !tokens.some((token) => token.origin) }, ...counts.flatMap(
      ([origin, count]) => [element("span", { class: String(origin) }, String(origin)), ` ${count} of ${tokens.length}  `],
    ));
    this.card = element("div", { class: "token-card", role: "status", hidden: true });
    this.replaceChildren(this.legend, this.text, this.card);
  }

  /** @param {EventTarget | null} target */
  point(target) {
    const index = target instanceof HTMLElement ? target.dataset.index : undefined;
    if (index !== undefined) this.select(Number(index));
  }

  /** @param {number} index -1: none. */
  select(index) {
    if (index === this.current || !this.text || !this.card) return;
    this.text.children[this.current]?.classList.remove("current");
    this.current = index;
    const span = /** @type {HTMLElement | undefined} */ (this.text.children[index]);
    this.card.hidden = !span;
    if (!span) return;
    span.classList.add("current");
    const token = this.tokens[index];
    const rows = token.likely.map((other) => row(other.text, other.logprob, other.text === token.text));
    this.card.replaceChildren(
      element("p", {}, element("code", {}, JSON.stringify(token.text)), ` ${about(token)}token ${index + 1} of ${this.tokens.length}`),
      element("table", { "aria-label": "The likeliest tokens here" }, element("tbody", {}, ...rows)),
    );
    const left = Math.min(span.offsetLeft, Math.max(0, this.clientWidth - this.card.offsetWidth));
    this.card.style.left = `${left}px`;
    this.card.style.top = `${span.offsetTop + span.offsetHeight + 6}px`;
  }
}

/**
 * @param {string} text
 * @param {number} logprob
 * @param {boolean} own
 */
function row(text, logprob, own) {
  const bar = element("span", { class: "likely-bar" });
  bar.style.width = `${Math.exp(logprob) * 6}rem`;
  return element(
    "tr", { class: own ? "own" : "" },
    element("td", {}, element("code", {}, JSON.stringify(text))), element("td", {}, percent(logprob)), element("td", {}, bar),
  );
}

/** @param {Token} token */
function about(token) {
  return [token.logprob === undefined ? "" : percent(token.logprob), token.origin ?? ""].filter(Boolean).map((text) => `${text}, `).join("");
}

/** @param {number} logprob */
export function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  return `${share < 0.1 ? "< 0.1" : share.toFixed(1)} %`;
}

/** @param {number | undefined} logprob */
export function shade(logprob) {
  return logprob === undefined ? 0 : SHADES.filter((limit) => Math.exp(logprob) < limit).length;
}

customElements.define("pw-tokens", TokensView);
