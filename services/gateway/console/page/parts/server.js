/** Requests to the server that has served this page, with the API key where it needs one. */

const KEY = "pagewire.key";

/** An answer of the server that is an error. */
export class ServerError extends Error {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Returns the API key of this tab; empty: none. It is kept until the tab is closed. */
export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** @param {string} value */
export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/**
 * Sends a request: a POST if there is a body.
 *
 * @param {string} path
 * @param {{body?: unknown, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>}
 * @throws {ServerError} The server refuses it.
 */
export async function send(path, { body, signal } = {}) {
  /** @type {Record<string, string>} */
  const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
  /** @type {RequestInit} */
  const init = { headers, signal, credentials: "omit", cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(init, { method: "POST", body: JSON.stringify(body) });
  }
  const response = await fetch(path, init);
  if (response.ok) return response;
  throw new ServerError(response.status, messageOf(await response.text(), response.status));
}

/**
 * Yields the data of the events of a stream.
 *
 * @param {Response} response
 * @returns {AsyncGenerator<string>}
 */
export async function* events(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = /** @type {string} */ (parts.pop());
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/**
 * Returns the sentence of an error's body.
 *
 * @param {string} text
 * @param {number} status
 */
function messageOf(text, status) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `the server answered ${status}`;
  }
}
