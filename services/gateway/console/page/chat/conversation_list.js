/** The conversations in this browser: to pick, remove, export and import. */

import { button, element } from "../parts/dom.js";
import { exported, imported } from "./conversation.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */

export class ConversationList extends HTMLElement {
  /** @type {(id: string) => void} Called with an empty id for a new conversation. */
  onpick = () => {};
  /** @type {(id: string) => void} */
  onremove = () => {};
  /** @type {(conversations: Conversation[]) => void} */
  onimport = () => {};

  connectedCallback() {
    if (this.rows) return;
    this.setAttribute("role", "complementary");
    this.setAttribute("aria-label", "Conversations");
    this.className = "panel left";
    this.rows = element("ul", { class: "conversations" });
    this.problem = element("p", { class: "problem", role: "alert" });
    const file = element("input", { type: "file", accept: "application/json,.json", hidden: true, "aria-label": "File to import" });
    file.addEventListener("change", () => void this.read(file));
    this.replaceChildren(
      button("New conversation", () => this.pick(""), { class: "wide" }),
      this.rows,
      this.problem,
      element("div", { class: "panel-foot" }, button("Import", () => file.click(), { class: "quiet small" }), button("Export all", () => this.write(), { class: "quiet small" }), file),
    );
  }

  /**
   * @param {Conversation[]} conversations
   * @param {string} currentId Id of the conversation in the thread.
   */
  show(conversations, currentId) {
    this.conversations = conversations;
    this.rows?.replaceChildren(...conversations.map((each) => element(
      "li", { class: each.id === currentId ? "current" : "" },
      button(each.title || "Untitled", () => this.pick(each.id), { "aria-current": each.id === currentId ? "true" : false }),
      button("×", () => this.onremove(each.id), { class: "quiet remove", "aria-label": `Remove ${each.title || "Untitled"}` }),
    )));
  }

  /** @param {string} id */
  pick(id) {
    this.dispatchEvent(new Event("close"));
    this.onpick(id);
  }

  write() {
    const url = URL.createObjectURL(new Blob([exported(this.conversations ?? [])], { type: "application/json" }));
    element("a", { href: url, download: "pagewire-conversations.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  /** @param {HTMLInputElement} file */
  async read(file) {
    const [chosen] = file.files ?? [];
    if (!chosen || !this.problem) return;
    try {
      this.onimport(imported(await chosen.text()));
      this.problem.textContent = "";
    } catch (error) {
      this.problem.textContent = /** @type {Error} */ (error).message;
    }
    file.value = "";
  }
}

customElements.define("pw-conversations", ConversationList);
