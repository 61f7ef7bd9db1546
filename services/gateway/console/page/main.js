/** Shows one of the views, by the part of the address behind `#`, and what belongs to all of them. */

import { Playground } from "./chat/playground.js";
import { element } from "./parts/dom.js";
import { key, send, ServerError, setKey } from "./parts/server.js";
import { Pipeline } from "./pipeline/pipeline.js";

const THEMES = ["auto", "light", "dark"];
/** Milliseconds between two checks of the health of the server. */
const HEALTH_INTERVAL = 3000;

const main = /** @type {HTMLElement} */ (document.querySelector("main"));
const health = /** @type {HTMLElement} */ (document.querySelector(".health"));
const playground = new Playground();
const pipeline = new Pipeline();

/** Shows the view that the address names. */
function route() {
  const [, view = "", id = ""] = location.hash.split("/"); // ids have no characters that need to be encoded
  const next = view === "pipeline" || view === "requests" ? pipeline : playground;
  if (main.firstElementChild !== next) main.replaceChildren(next);
  if (next === pipeline) pipeline.showRequest(id);
  for (const link of document.querySelectorAll("nav a")) {
    const current = /** @type {HTMLElement} */ (link).dataset.view === (next === pipeline ? "pipeline" : "playground");
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function watchTheme() {
  const toggle = /** @type {HTMLButtonElement} */ (document.getElementById("theme"));
  const root = document.documentElement;
  /** @param {string} theme */
  const apply = (theme) => {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    toggle.textContent = `Theme: ${theme}`;
  };
  apply(root.dataset.theme ?? "auto");
  toggle.addEventListener("click", () => {
    const theme = THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length];
    localStorage.setItem("pagewire.theme", theme);
    apply(theme);
  });
}

/** Shows whether the server serves requests, until the page is closed. */
async function watchHealth() {
  for (;;) {
    let state = "unreachable";
    let text = "The server cannot be reached";
    try {
      const response = await fetch("/health", { cache: "no-store" });
      state = response.ok ? "ready" : "waiting";
      text = await response.text();
    } catch {
      // The text says so.
    }
    if (health.dataset.state && health.dataset.state !== state && state === "ready") void playground.connect();
    health.dataset.state = state;
    if (health.textContent !== text) health.textContent = text;
    await new Promise((resolve) => setTimeout(resolve, HEALTH_INTERVAL));
  }
}

/** Asks for the API key if the server needs one, and has its views begin with it. */
async function watchKey() {
  const open = /** @type {HTMLButtonElement} */ (document.getElementById("key"));
  const input = element("input", { type: "password", autocomplete: "off", id: "api-key", required: true });
  const problem = element("p", { class: "problem", role: "alert" });
  const form = element(
    "form", { method: "dialog" },
    element("h2", {}, "API key"),
    element("p", { class: "meaning" }, "This server needs a key. It is kept in this tab until the tab is closed."),
    element("label", { for: "api-key" }, "Key"), input, problem,
    element("button", { class: "main", type: "submit" }, "Use this key"),
  );
  const dialog = element("dialog", { "aria-label": "API key" }, form);
  document.body.append(dialog);
  open.addEventListener("click", () => dialog.showModal());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    setKey(input.value.trim());
    if (await isRefused()) {
      problem.textContent = "The server does not know this key.";
      return;
    }
    input.value = problem.textContent = "";
    dialog.close();
    await playground.connect();
    pipeline.restart();
  });
  if (await isRefused()) {
    open.hidden = false;
    dialog.showModal();
  }
  open.hidden &&= !key();
}

/** Returns whether the server refuses the key of this tab, or that there is none. */
async function isRefused() {
  try {
    await send("/v1/models");
  } catch (error) {
    return error instanceof ServerError && error.status === 401;
  }
  return false;
}

watchTheme();
addEventListener("hashchange", route);
route();
void watchKey();
void watchHealth();
