/** Turns a conversation into the body of a request. */

/** @typedef {import("./conversation.js").Conversation} Conversation */
/** @typedef {import("./conversation.js").Turn} Turn */
/** @typedef {{path: string, body: Record<string, unknown>}} Call */

export const PATHS = { chat: "/v1/chat/completions", completion: "/v1/completions" };
/** The likeliest tokens that are asked for with each token, if the conversation shows probabilities. */
const LIKELY = 5;

/**
 * Returns the request that asks for the turn behind others.
 *
 * @param {Conversation} conversation
 * @param {Turn[]} turns
 * @returns {Call}
 * @throws {Error} Tools or schema are not JSON.
 */
export function call(conversation, turns) {
  const { logprobs, ...others } = conversation.fields;
  const fields = { model: conversation.model, ...others };
  if (conversation.kind === "completion") {
    const body = { ...fields, prompt: turns.map((turn) => turn.text).join(""), ...(logprobs ? { logprobs: LIKELY } : {}) };
    return { path: PATHS.completion, body };
  }
  const tools = parsed("the tools", conversation.tools);
  const schema = parsed("the JSON schema", conversation.schema);
  return {
    path: PATHS.chat,
    body: {
      ...fields,
      messages: [
        ...(conversation.system.trim() ? [{ role: "system", content: conversation.system }] : []),
        ...turns.map(message),
      ],
      ...(logprobs ? { logprobs: true, top_logprobs: LIKELY } : {}),
      ...(tools === undefined ? {} : { tools }),
      ...(schema === undefined
        ? {}
        : { response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } } }),
    },
  };
}

/**
 * Returns the body of a request with the fields of a stream.
 *
 * @param {Call} request
 * @returns {Record<string, unknown>}
 */
export function streamed(request) {
  return { ...request.body, stream: true, stream_options: { include_usage: true } };
}

/**
 * @param {Turn} turn
 * @returns {Record<string, unknown>}
 */
function message(turn) {
  if (turn.role === "tool") return { role: "tool", tool_call_id: turn.callId, content: turn.text };
  if (turn.role !== "assistant" || !turn.calls.length) return { role: turn.role, content: turn.text };
  return {
    role: "assistant",
    content: turn.text || null,
    tool_calls: turn.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } })),
  };
}

/**
 * @param {string} name
 * @param {string} text
 * @returns {unknown} undefined if the text is empty.
 */
function parsed(name, text) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} are not JSON: ${/** @type {Error} */ (error).message}`);
  }
}
