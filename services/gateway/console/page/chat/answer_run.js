/** Sends a request and adds its stream to the turns of the answer. */

import { events, send } from "../parts/server.js";
import { apply, rate } from "./answer.js";
import { streamed } from "./request.js";

/** @typedef {import("./conversation.js").Turn} Turn */

const DONE = "[DONE]";

/**
 * Runs a request to its end. Errors become part of the turns.
 *
 * @param {import("./request.js").Call} request
 * @param {Turn[]} turns One per choice.
 * @param {AbortSignal} signal Stops it.
 * @param {() => void} ondraw Called at most once per frame after changes.
 */
export async function runAnswer(request, turns, signal, ondraw) {
  const began = performance.now();
  let first = 0;
  let last = began;
  let waiting = false;
  const draw = () => {
    if (waiting) return;
    waiting = true;
    // A hidden page draws no frames, and its answers go on.
    const next = document.hidden ? setTimeout : requestAnimationFrame;
    next(() => { waiting = false; ondraw(); });
  };
  let complete = false;
  try {
    const response = await send(request.path, { body: streamed(request), signal });
    for (const turn of turns) turn.requestId = response.headers.get("X-Request-Id") ?? "";
    for await (const data of events(response)) {
      complete = data === DONE;
      if (complete) break;
      if (apply(turns, JSON.parse(data))) {
        last = performance.now();
        first ||= last;
        draw();
      }
    }
    if (!complete) throw new Error("The connection ended before the answer: try again.");
  } catch (error) {
    const { name, message } = /** @type {Error} */ (error);
    const lost = name === "TypeError";
    for (const turn of turns) {
      turn.end = signal.aborted ? "stopped" : "error";
      turn.error = signal.aborted ? "" : lost ? "The server cannot be reached: try again when it is back." : message;
    }
  }
  for (const turn of turns) {
    turn.end ||= "stop";
    if (first) turn.figures.firstTokenMs = first - began;
    turn.figures.tokensPerSecond = rate(turn.figures.tokens ?? turn.tokens.length, last - first);
  }
}
