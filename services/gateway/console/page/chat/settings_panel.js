/** The settings of a conversation: model, kind, system prompt, tools, schema, and every field of its requests. */

import { element, present } from "../parts/dom.js";
import { FieldsForm } from "./fields_form.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */
/** @typedef {import("./fields_form.js").Field} Field */

export class SettingsPanel extends HTMLElement {
  onconversation = () => {};
  /** @type {string[]} */
  models = [];
  /** @type {Record<string, Field[]>} */
  fields = { chat: [], completion: [] };
  /** @type {Conversation | null} */
  conversation = null;

  connectedCallback() {
    this.setAttribute("role", "complementary");
    this.setAttribute("aria-label", "Settings of this conversation");
    this.className = "panel right";
  }

  /**
   * @param {string[]} models
   * @param {Record<string, Field[]>} fields By kind of conversation.
   */
  offer(models, fields) {
    this.models = models;
    this.fields = fields;
  }

  /** @param {Conversation} conversation */
  show(conversation) {
    this.conversation = conversation;
    const chat = conversation.kind === "chat";
    const form = new FieldsForm();
    form.onvalues = () => this.onconversation();
    form.show(this.fields[conversation.kind], conversation.fields);
    this.replaceChildren(...present([
      labelled("Model", this.choice("model", this.models.length ? this.models : [conversation.model])),
      labelled("Kind", this.choice("kind", ["chat", "completion"])),
      chat && labelled("System prompt", this.text("system", "Instructions ahead of the conversation")),
      this.probabilities(conversation),
      chat && this.folded("Tools", conversation.tools, labelled("Tools, as a JSON list in OpenAI's shape", this.text("tools", TOOLS))),
      chat && this.folded("JSON schema", conversation.schema, labelled("JSON schema that answers keep to", this.text("schema", SCHEMA))),
      element(
        "details", { class: "fold", open: true }, element("summary", {}, "Sampling"),
        element("p", { class: "meaning" }, "A field that is left alone has the model's own value, else the default shown."), form,
      ),
    ]));
  }

  /**
   * @param {"model" | "kind"} name
   * @param {string[]} values
   */
  choice(name, values) {
    const conversation = /** @type {Conversation} */ (this.conversation);
    const select = element("select", {}, ...values.map((value) => element("option", { value, selected: value === conversation[name] }, value)));
    select.addEventListener("change", () => {
      Object.assign(conversation, { [name]: select.value });
      if (name === "kind") this.show(conversation);
      this.onconversation();
    });
    return select;
  }

  /**
   * @param {"system" | "tools" | "schema"} name
   * @param {string} placeholder
   */
  text(name, placeholder) {
    const conversation = /** @type {Conversation} */ (this.conversation);
    const input = element("textarea", { rows: name === "system" ? 3 : 6, placeholder, spellcheck: "false" });
    input.value = conversation[name];
    input.addEventListener("input", () => { conversation[name] = input.value; this.onconversation(); });
    return input;
  }

  /** @param {Conversation} conversation */
  probabilities(conversation) {
    const box = element("input", { type: "checkbox" });
    box.checked = Boolean(conversation.fields.logprobs);
    box.addEventListener("change", () => {
      if (box.checked) conversation.fields.logprobs = true;
      else delete conversation.fields.logprobs;
      this.onconversation();
    });
    return element("label", { class: "check" }, box, "Token probabilities");
  }

  /**
   * @param {string} title
   * @param {string} value
   * @param {HTMLElement} content
   */
  folded(title, value, content) {
    return element("details", { class: "fold", open: Boolean(value) }, element("summary", {}, title), content);
  }
}

const TOOLS = `[{"type": "function", "function": {
  "name": "weather",
  "parameters": {"type": "object",
    "properties": {"city": {"type": "string"}}}}}]`;
const SCHEMA = `{"type": "object",
 "properties": {"name": {"type": "string"}},
 "required": ["name"]}`;

/**
 * @param {string} label
 * @param {HTMLElement} control
 */
function labelled(label, control) {
  return element("label", { class: "labelled" }, element("span", {}, label), control);
}

customElements.define("pw-settings", SettingsPanel);
