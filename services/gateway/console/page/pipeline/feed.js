/** Follows the server's event stream while somebody looks: it ends with the view, and while the page is hidden. */

import { events, send, ServerError } from "../parts/server.js";

/** Milliseconds before a lost stream is opened again. */
const RETRY = 1000;
/** Milliseconds without an event after which the stream is lost: events come four times a second. */
const SILENCE = 5000;

export class Feed {
  /**
   * @param {(event: any) => void} onevent
   * @param {(state: string, faults: boolean) => void} onstate Called with an empty state while the stream is there,
   *   else with a sentence.
   */
  constructor(onevent, onstate) {
    this.onevent = onevent;
    this.onstate = onstate;
    this.active = false;
    /** @type {AbortController | null} */
    this.abort = null;
    document.addEventListener("visibilitychange", () => this.update());
  }

  open() {
    this.active = true;
    this.update();
  }

  close() {
    this.active = false;
    this.update();
  }

  /** Opens the stream anew, as after a change of the key. */
  restart() {
    this.abort?.abort();
    this.abort = null;
    this.update();
  }

  update() {
    const looks = this.active && !document.hidden;
    if (looks && !this.abort) void this.follow((this.abort = new AbortController()));
    if (!looks && this.abort) {
      this.abort.abort();
      this.abort = null;
    }
  }

  /** @param {AbortController} abort */
  async follow(abort) {
    while (!abort.signal.aborted) {
      const attempt = new AbortController();
      const stop = () => attempt.abort();
      abort.signal.addEventListener("abort", stop);
      let timer = setTimeout(stop, SILENCE);
      try {
        const response = await send("/console/events", { signal: attempt.signal });
        this.onstate("", response.headers.get("Pagewire-Faults") === "1");
        for await (const data of events(response)) {
          clearTimeout(timer);
          timer = setTimeout(stop, SILENCE);
          this.onevent(JSON.parse(data));
        }
      } catch (error) {
        if (error instanceof ServerError && error.status === 401) {
          this.onstate("This view needs the API key: choose Key above.", false);
        }
      } finally {
        clearTimeout(timer);
        abort.signal.removeEventListener("abort", stop);
      }
      if (abort.signal.aborted) return;
      this.onstate("The event stream has ended: it is opened again as soon as the server answers.", false);
      await new Promise((resolve) => setTimeout(resolve, RETRY));
    }
  }
}
