/** Builds elements. Texts become text nodes, never markup. */

/** @typedef {Node | string | null | undefined | false} Child */
/** @typedef {Record<string, unknown>} Properties */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Returns a new element.
 *
 * A property whose value is a function is a listener (`onclick`), `true` an empty attribute, and `false`, null and
 * undefined none.
 *
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Properties} [properties]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  set(node, properties);
  node.append(...present(children));
  return node;
}

/**
 * Returns a new element of a drawing.
 *
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Properties} [properties]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[Tag]}
 */
export function drawing(tag, properties = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  set(node, properties);
  node.append(...present(children));
  return node;
}

/**
 * Returns a button.
 *
 * @param {string} label
 * @param {() => void} onclick
 * @param {Properties} [properties]
 */
export function button(label, onclick, properties = {}) {
  return element("button", { type: "button", onclick, ...properties }, label);
}

/**
 * Sets a text only if it has changed, so that nothing is drawn again without need.
 *
 * @param {Node} node
 * @param {string} text
 */
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * @param {Element} node
 * @param {Properties} properties
 */
function set(node, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") {
      node.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    } else if (value === true) {
      node.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, String(value));
    }
  }
}

/**
 * Returns the children that are there.
 *
 * @param {Child[]} children
 * @returns {(Node | string)[]}
 */
export function present(children) {
  return /** @type {(Node | string)[]} */ (children.filter((child) => child || child === ""));
}
