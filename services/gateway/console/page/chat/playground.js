/** The playground: conversations, the thread of the current one, and its settings. */

import { button, element, write } from "../parts/dom.js";
import { key, send } from "../parts/server.js";
import { runAnswer } from "./answer_run.js";
import { ConversationList } from "./conversation_list.js";
import { add, choose, newConversation, path, siblings, upTo } from "./conversation.js";
import { call } from "./request.js";
import { SettingsPanel } from "./settings_panel.js";
import { SNIPPETS } from "./snippets.js";
import { load, remove, save } from "./storage.js";
import { copyButton, TurnView } from "./turn_view.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */
/** @typedef {import("./conversation.js").Turn} Turn */

/** Milliseconds after a change until a conversation is kept. */
const SAVE_DELAY = 400;
/** Pixels from the end within which a thread follows what is added. */
const FOLLOWS = 80;
/** Branches that one request may make. */
const MOST_CHOICES = 64;

export class Playground extends HTMLElement {
  /** @type {Conversation[]} */
  conversations = [];
  current = newConversation();
  /** @type {string[]} */
  models = [];
  broker = "";
  /** Running requests, by the id of their conversation. @type {Map<string, AbortController>} */
  running = new Map();
  /** @type {Map<string, TurnView>} */
  views = new Map();
  /** Changed conversations that are not kept yet. @type {Set<Conversation>} */
  unsaved = new Set();

  connectedCallback() {
    if (this.thread) return;
    this.list = new ConversationList();
    this.settings = new SettingsPanel();
    this.thread = element("section", { class: "thread", role: "log", "aria-label": "Conversation", "aria-live": "off", tabindex: "0" });
    this.announcer = element("p", { class: "hidden", role: "status" });
    this.input = element("textarea", { rows: 1, "aria-label": "Message", enterkeyhint: "send" });
    this.input.addEventListener("input", () => this.fit());
    this.input.addEventListener("keydown", (event) => this.onkey(event));
    this.sender = button("Send", () => this.submit(), { class: "main" });
    this.problem = element("p", { class: "problem", role: "alert" });
    this.copies = element("div", { class: "copies", role: "group", "aria-label": "Copy the request as" });
    const composer = element(
      "div", { class: "composer" },
      this.problem,
      element("div", { class: "composer-row" }, this.input, this.sender),
      element("div", { class: "composer-foot" }, this.copies, element("span", { class: "keys" }, "Enter sends, Shift+Enter breaks the line, Esc stops, ↑ edits")),
    );
    this.replaceChildren(
      this.list,
      element(
        "div", { class: "middle" },
        element("div", { class: "panel-buttons" }, panelButton("Conversations", this.list), panelButton("Settings", this.settings)),
        this.thread, composer, this.announcer,
      ),
      this.settings,
    );
    this.list.onpick = (id) => this.show(this.conversations.find((each) => each.id === id) ?? newConversation(this.current));
    this.list.onremove = (id) => this.drop(id);
    this.list.onimport = (all) => this.take(all);
    this.settings.onconversation = () => { this.renderComposer(); this.keep(this.current); };
    this.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    void this.begin();
  }

  async begin() {
    this.conversations = await load();
    this.current = this.conversations[0] ?? this.current;
    this.show(this.current);
    await this.connect();
  }

  /** Asks the server for its models and fields. */
  async connect() {
    try {
      const [models, fields, version] = await Promise.all(
        ["/v1/models", "/console/fields.json", "/version"].map(async (url) => (await send(url)).json()),
      );
      this.models = models.data.map((/** @type {{id: string}} */ model) => model.id);
      this.broker = version.nats;
      this.settings?.offer(this.models, fields);
      if (!this.models.includes(this.current.model)) this.current.model = this.models[0] ?? "";
      this.settings?.show(this.current);
      this.report("");
    } catch (error) {
      this.report(/** @type {Error} */ (error).message);
    }
    this.renderComposer();
  }

  /** @param {Conversation} conversation */
  show(conversation) {
    this.current = conversation;
    if (this.models.length && !this.models.includes(conversation.model)) conversation.model = this.models[0];
    this.settings?.show(conversation);
    this.list?.show(this.conversations, conversation.id);
    this.report("");
    this.render();
    this.follow(true);
    if (matchMedia("(pointer: fine)").matches) this.input?.focus();
  }

  /** Draws the shown path. Views of turns that stay are kept. */
  render() {
    const turns = path(this.current);
    const completion = this.current.kind === "completion";
    const old = this.views;
    this.views = new Map();
    const actions = {
      edit: this.edit.bind(this), regenerate: this.regenerate.bind(this),
      choose: this.chooseBranch.bind(this), answerCalls: this.answerCalls.bind(this),
    };
    for (const [index, turn] of turns.entries()) {
      const view = old.get(turn.id) ?? new TurnView();
      const others = siblings(this.current, turn);
      const last = index === turns.length - 1;
      const fresh = view.turn !== turn || view.siblings?.length !== others.length || view.place?.last !== last;
      if (fresh) view.show(turn, others, actions, { completion, last });
      this.views.set(turn.id, view);
    }
    const welcome = element("div", { class: "welcome" }, element("h2", {}, "Ask the model something"), element("p", {}, "Nothing leaves this server: conversations stay in this browser."));
    this.thread?.replaceChildren(...(turns.length ? this.views.values() : [welcome]));
    this.renderComposer();
  }

  renderComposer() {
    if (!this.sender || !this.input || !this.copies) return;
    const runs = this.running.has(this.current.id);
    write(this.sender, runs ? "Stop" : "Send");
    this.sender.classList.toggle("stop", runs);
    this.input.placeholder = this.current.kind === "completion" ? "Text that the model continues" : "Message";
    const server = { http: location.origin, nats: this.broker, keyed: Boolean(key()) };
    this.copies.replaceChildren("Copy as ", ...Object.entries(SNIPPETS).map(([name, snippet]) => (
      copyButton(name, () => snippet(call(this.current, this.requestTurns()), server))
    )));
  }

  /** Returns the turns of the request that was sent last, or of the one that would be sent. */
  requestTurns() {
    const turns = path(this.current);
    const text = this.input?.value ?? "";
    if (text.trim()) return [...turns, /** @type {Turn} */ ({ role: "user", text, calls: /** @type {any[]} */ ([]) })];
    return turns.at(-1)?.role === "assistant" ? turns.slice(0, -1) : turns;
  }

  /** @param {KeyboardEvent} event */
  onkey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" && !this.input?.value) {
      const last = path(this.current).filter((turn) => turn.role === "user").at(-1);
      if (last) this.views.get(last.id)?.edit();
    }
  }

  submit() {
    if (this.running.has(this.current.id)) return this.stop();
    const text = this.input?.value ?? "";
    if (!text.trim() || !this.input) return undefined;
    this.input.value = "";
    this.fit();
    const last = path(this.current).at(-1);
    const turn = add(this.current, last?.id ?? "", "user", { text });
    return this.generate(turn.id);
  }

  stop() {
    this.running.get(this.current.id)?.abort();
  }

  /** @param {Turn} turn @param {string} text */
  edit(turn, text) {
    this.stop();
    void this.generate(add(this.current, turn.parent, "user", { text }).id);
  }

  /** @param {Turn} turn */
  regenerate(turn) {
    this.stop();
    void this.generate(turn.parent);
  }

  /** @param {Turn} turn */
  chooseBranch(turn) {
    choose(this.current, turn);
    this.keep(this.current);
    this.render();
  }

  /** @param {Turn} turn @param {string[]} results */
  answerCalls(turn, results) {
    let parent = turn.id;
    for (const [index, call] of turn.calls.entries()) {
      parent = add(this.current, parent, "tool", { text: results[index], callId: call.id }).id;
    }
    void this.generate(parent);
  }

  /**
   * Has the model answer behind a turn.
   *
   * @param {string} parent
   */
  async generate(parent) {
    const conversation = this.current;
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    this.running.get(conversation.id)?.abort();
    let request;
    try {
      request = call(conversation, upTo(conversation, parent));
    } catch (error) {
      this.render();
      return this.report(/** @type {Error} */ (error).message);
    }
    this.report("");
    const choices = Math.trunc(Number(conversation.fields.n)) || 1;
    const turns = Array.from({ length: Math.min(Math.max(choices, 1), MOST_CHOICES) }, () => add(conversation, parent, "assistant", { model: conversation.model }));
    choose(conversation, turns[0]);
    const abort = new AbortController();
    this.running.set(conversation.id, abort);
    this.list?.show(this.conversations, this.current.id);
    this.render();
    this.follow(true);
    await runAnswer(request, turns, abort.signal, () => {
      for (const turn of turns) this.views.get(turn.id)?.update();
      this.follow(false);
    });
    if (this.running.get(conversation.id) === abort) this.running.delete(conversation.id);
    this.keep(conversation);
    if (conversation === this.current) {
      for (const turn of turns) this.views.get(turn.id)?.finish();
      this.renderComposer();
      this.follow(false);
      if (this.announcer) this.announcer.textContent = turns[0].error || `The answer is complete: ${turns[0].text.slice(0, 400)}`;
    }
    return undefined;
  }

  /** @param {Conversation} conversation */
  keep(conversation) {
    if (!this.conversations.includes(conversation)) return;
    if (!this.unsaved.size) setTimeout(() => void this.saveAll(), SAVE_DELAY);
    this.unsaved.add(conversation);
  }

  async saveAll() {
    const changed = [...this.unsaved];
    this.unsaved.clear();
    const kept = await Promise.all(changed.map(save));
    if (kept.includes(false)) this.report("This browser has no room for the conversation: export it to keep it.");
  }

  /** @param {string} id */
  drop(id) {
    this.running.get(id)?.abort();
    this.conversations = this.conversations.filter((each) => each.id !== id);
    void remove(id);
    this.show(id === this.current.id ? this.conversations[0] ?? newConversation(this.current) : this.current);
  }

  /** @param {Conversation[]} conversations */
  take(conversations) {
    this.conversations.unshift(...conversations);
    for (const each of conversations) void save(each);
    if (conversations.length) this.show(conversations[0]);
  }

  /** @param {string} text */
  report(text) {
    if (this.problem) write(this.problem, text);
  }

  fit() {
    if (!this.input) return;
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  /**
   * Scrolls to the end.
   *
   * @param {boolean} always Also if the reader has scrolled away.
   */
  follow(always) {
    const { thread } = this;
    if (thread && (always || thread.scrollHeight - thread.scrollTop - thread.clientHeight < FOLLOWS)) {
      thread.scrollTop = thread.scrollHeight;
    }
  }
}

/**
 * Returns the button that opens a panel where there is no room beside the thread.
 *
 * @param {string} label
 * @param {HTMLElement} panel
 */
function panelButton(label, panel) {
  const toggle = button(label, () => {
    panel.classList.toggle("open");
    toggle.setAttribute("aria-expanded", String(panel.classList.contains("open")));
    if (panel.classList.contains("open")) /** @type {HTMLElement | null} */ (panel.querySelector("button, select, input"))?.focus();
  }, { class: "quiet small", "aria-expanded": "false" });
  panel.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && panel.classList.contains("open")) { event.stopPropagation(); toggle.click(); toggle.focus(); }
  });
  panel.addEventListener("close", () => panel.classList.contains("open") && toggle.click());
  return toggle;
}

customElements.define("pw-playground", Playground);
