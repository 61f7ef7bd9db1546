/** The form of the fields of requests, made from the server's own table of them. */

import { button, element } from "../parts/dom.js";

/**
 * @typedef {object} Field
 * @property {string} name
 * @property {string} kind Type in words, as in docs/http.md: `integer`, `string or list of string`.
 * @property {unknown} default
 * @property {number} [minimum]
 * @property {number} [maximum]
 * @property {string} meaning
 */

/** Calls `onchange` with the fields that differ from their defaults. */
export class FieldsForm extends HTMLElement {
  /** @type {Field[]} */
  table = [];
  /** @type {Record<string, unknown>} */
  values = {};
  /** @type {(values: Record<string, unknown>) => void} */
  onvalues = () => {};

  /**
   * @param {Field[]} table
   * @param {Record<string, unknown>} values
   */
  show(table, values) {
    this.table = table;
    this.values = values;
    this.replaceChildren(...table.map((field) => this.row(field)));
  }

  /** @param {Field} field */
  row(field) {
    const id = `field-${field.name}`;
    const meaning = element("p", { id: `${id}-meaning`, class: "meaning" }, field.meaning);
    const problem = element("p", { class: "problem", role: "alert" });
    const reset = button("Reset", () => {
      delete this.values[field.name];
      this.onvalues(this.values);
      row.replaceWith(this.row(field));
    }, { class: "quiet small", "aria-label": `Reset ${field.name}` });
    const input = this.input(field, id, problem, () => row.classList.toggle("changed", field.name in this.values));
    const head = element("div", { class: "field-head" }, element("label", { for: id }, field.name), reset);
    const row = element("div", { class: "field" }, head, input, problem, meaning);
    row.classList.toggle("changed", field.name in this.values);
    return row;
  }

  /**
   * @param {Field} field
   * @param {string} id
   * @param {HTMLElement} problem
   * @param {() => void} onset
   */
  input(field, id, problem, onset) {
    const value = this.values[field.name];
    const properties = { id, "aria-describedby": `${id}-meaning`, autocomplete: "off" };
    /** @param {unknown} next undefined: the default. */
    const take = (next) => {
      if (next === undefined) delete this.values[field.name];
      else this.values[field.name] = next;
      this.onvalues(this.values);
      onset();
    };
    if (field.kind === "boolean") {
      const box = element("input", { ...properties, type: "checkbox" });
      box.checked = Boolean(value ?? field.default);
      box.addEventListener("change", () => take(box.checked === field.default ? undefined : box.checked));
      return box;
    }
    const isNumber = field.kind === "integer" || field.kind === "number";
    const input = element("input", {
      ...properties, type: "text", inputmode: isNumber ? "decimal" : false, placeholder: placeholder(field), spellcheck: "false",
    });
    input.value = value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
    input.addEventListener("input", () => {
      problem.textContent = "";
      try {
        take(read(field, input.value));
      } catch (error) {
        problem.textContent = /** @type {Error} */ (error).message;
      }
    });
    return input;
  }
}

/** @param {Field} field */
function placeholder(field) {
  const value = field.default;
  if (value === null || value === undefined || (Array.isArray(value) && !value.length)) return "none";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/**
 * Returns the value that a text means; undefined: the default.
 *
 * @param {Field} field
 * @param {string} text
 * @returns {unknown}
 * @throws {Error} The text is no value of the field.
 */
export function read(field, text) {
  if (!text.trim()) return undefined;
  if (field.kind === "integer" || field.kind === "number") {
    const number = Number(text);
    if (!Number.isFinite(number) || (field.kind === "integer" && !Number.isInteger(number))) {
      throw new Error(`${field.name} is ${field.kind === "integer" ? "a whole number" : "a number"}`);
    }
    if (field.minimum !== undefined && number < field.minimum) throw new Error(`${field.name} is at least ${field.minimum}`);
    if (field.maximum !== undefined && number > field.maximum) throw new Error(`${field.name} is at most ${field.maximum}`);
    return number;
  }
  const kinds = field.kind.split(" or ");
  if (field.kind === "string" || kinds.includes(text.trim())) return text.trim();
  try {
    return JSON.parse(text);
  } catch {
    if (kinds.includes("string")) return text;
    throw new Error(`${field.name} is JSON: ${field.kind}`);
  }
}

customElements.define("pw-fields", FieldsForm);
