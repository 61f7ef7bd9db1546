/** Adds the events of a streamed answer to a turn. */

/** @typedef {import("./conversation.js").Turn} Turn */
/** @typedef {import("./conversation.js").Token} Token */
/** @typedef {any} Event An event of OpenAI's streams, as the server sends it. */

/**
 * Adds an event to the turns of an answer, one per choice.
 *
 * @param {Turn[]} turns
 * @param {Event} event
 * @returns {boolean} Whether the event has a token.
 * @throws {Error} The event is an error.
 */
export function apply(turns, event) {
  if (event.error) throw new Error(event.error.message ?? "the server has met a fault");
  let hasToken = false;
  for (const choice of event.choices ?? []) {
    const turn = turns[choice.index];
    if (!turn) continue;
    const delta = choice.delta ?? { content: choice.text };
    turn.text += delta.content ?? "";
    turn.reasoning += delta.reasoning ?? "";
    for (const part of delta.tool_calls ?? []) addCall(turn, part);
    turn.tokens.push(...tokensOf(choice.logprobs, choice.token_origin));
    hasToken ||= Boolean(delta.content || delta.reasoning || delta.tool_calls || choice.logprobs || choice.token_origin);
    if (choice.finish_reason) turn.end = choice.finish_reason;
  }
  if (event.usage) {
    for (const turn of turns) {
      turn.figures.promptTokens = event.usage.prompt_tokens;
      turn.figures.cachedTokens = event.usage.prompt_tokens_details?.cached_tokens ?? 0;
      turn.figures.tokens = event.usage.completion_tokens / turns.length;
    }
  }
  return hasToken;
}

/**
 * Returns the tokens per second after the first token; undefined for a single one.
 *
 * @param {number | undefined} tokens
 * @param {number} milliseconds From the first token to the last.
 */
export function rate(tokens, milliseconds) {
  return tokens && tokens > 1 && milliseconds > 0 ? ((tokens - 1) * 1000) / milliseconds : undefined;
}

/**
 * @param {Turn} turn
 * @param {any} part
 */
function addCall(turn, part) {
  const call = (turn.calls[part.index] ??= { id: "", name: "", arguments: "" });
  call.id ||= part.id ?? "";
  call.name ||= part.function?.name ?? "";
  call.arguments += part.function?.arguments ?? "";
}

/**
 * Returns the tokens of a chat's or a completion's log-probabilities, which have different shapes, or the one token whose
 * origin an event tells.
 *
 * @param {any} logprobs
 * @param {any} origin
 * @returns {Token[]}
 */
function tokensOf(logprobs, origin) {
  if (origin) {
    const [token = { text: origin.text, likely: [] }] = tokensOf(logprobs, undefined);
    return [{ ...token, origin: origin.origin }];
  }
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((/** @type {any} */ each) => ({
      text: each.token,
      logprob: each.logprob,
      likely: (each.top_logprobs ?? []).map((/** @type {any} */ other) => ({ text: other.token, logprob: other.logprob })),
    }));
  }
  return (logprobs.tokens ?? []).map((/** @type {string} */ text, /** @type {number} */ index) => ({
    text,
    logprob: logprobs.token_logprobs[index],
    likely: Object.entries(logprobs.top_logprobs?.[index] ?? {})
      .map(([other, logprob]) => ({ text: other, logprob: Number(logprob) }))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}
