/** A conversation as a tree of turns: edits and repeated answers are branches beside the first ones. */

/**
 * @typedef {object} Token
 * @property {string} text
 * @property {number} [logprob]
 * @property {{text: string, logprob: number}[]} likely
 * @property {string} [origin] How the token came: one of `ORIGINS`.
 */
/** @typedef {{id: string, name: string, arguments: string}} ToolCall */
/**
 * @typedef {object} Figures
 * @property {number} [promptTokens]
 * @property {number} [cachedTokens] Tokens of the prompt that were in the prefix cache.
 * @property {number} [tokens] Generated tokens.
 * @property {number} [firstTokenMs] Milliseconds from sending to the first token.
 * @property {number} [tokensPerSecond] Generated tokens after the first, by the time from the first to the last.
 */
/**
 * @typedef {object} Turn
 * @property {string} id
 * @property {string} parent Id of the turn before; empty: this is a first turn.
 * @property {"user" | "assistant" | "tool"} role
 * @property {string} text
 * @property {string} reasoning
 * @property {ToolCall[]} calls Calls that the model has made.
 * @property {string} callId Call whose result a tool's turn holds.
 * @property {Token[]} tokens Tokens with their probabilities or origins; empty if the request did not ask for them.
 * @property {string} model
 * @property {string} requestId
 * @property {string} end Why the answer ended: `stop`, `length`, `tool_calls`, `stopped`, `error`; empty: it has not.
 * @property {string} error
 * @property {Figures} figures
 */
/**
 * @typedef {object} Conversation
 * @property {string} id
 * @property {"chat" | "completion"} kind
 * @property {string} title
 * @property {number} changed Milliseconds since 1970.
 * @property {string} model
 * @property {string} system
 * @property {Record<string, unknown>} fields Fields of requests that differ from their defaults.
 * @property {string} tools JSON: a list of tools in OpenAI's shape; empty: none.
 * @property {string} schema JSON schema of the answers; empty: none.
 * @property {Record<string, Turn>} turns By id, in the order in which they were added.
 * @property {Record<string, string>} chosen The turn that follows each turn on the shown path, by id; "" for the first.
 */

export const FORMAT = "pagewire.conversations.v1";
const LONGEST = 4_000_000;
const MOST_TURNS = 10_000;
const REQUEST_ID = /^[\w-]{1,64}$/;
/** Ways in which a token comes: sampled, drafted and right, or the only one that a grammar allows. */
export const ORIGINS = ["sampled", "drafted", "forced"];

/** Returns a random id. `crypto.randomUUID` needs HTTPS or this machine; this does not. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Returns an empty conversation with the settings of another one.
 *
 * @param {Partial<Conversation>} [settings]
 * @returns {Conversation}
 */
export function newConversation(settings = {}) {
  const { kind = "chat", model = "", system = "", fields = {}, tools = "", schema = "" } = settings;
  return {
    id: newId(), kind, title: "", changed: Date.now(), model, system, fields: { ...fields }, tools, schema, turns: {}, chosen: {},
  };
}

/**
 * Adds a turn behind another one and shows it.
 *
 * @param {Conversation} conversation
 * @param {string} parent Id of the turn before; empty: none.
 * @param {Turn["role"]} role
 * @param {Partial<Turn>} [rest]
 * @returns {Turn}
 */
export function add(conversation, parent, role, rest = {}) {
  /** @type {Turn} */
  const turn = {
    text: "", reasoning: "", calls: [], callId: "", tokens: [], model: "", requestId: "", end: "", error: "", figures: {},
    ...rest, id: newId(), parent, role,
  };
  conversation.turns[turn.id] = turn;
  choose(conversation, turn);
  if (!conversation.title && role === "user") conversation.title = turn.text.trim().slice(0, 60).replace(/\s+/g, " ");
  return turn;
}

/**
 * Shows a turn instead of the others behind the same one.
 *
 * @param {Conversation} conversation
 * @param {Turn} turn
 */
export function choose(conversation, turn) {
  conversation.chosen[turn.parent] = turn.id;
  conversation.changed = Date.now();
}

/**
 * Returns the shown turns, first to last.
 *
 * @param {Conversation} conversation
 * @returns {Turn[]}
 */
export function path(conversation) {
  const turns = [];
  for (let id = conversation.chosen[""]; id; id = conversation.chosen[id]) turns.push(conversation.turns[id]);
  return turns;
}

/**
 * Returns the turns up to one, first to last.
 *
 * @param {Conversation} conversation
 * @param {string} id Id of the last turn; empty: there is none.
 * @returns {Turn[]}
 */
export function upTo(conversation, id) {
  const turns = [];
  for (let turn = conversation.turns[id]; turn; turn = conversation.turns[turn.parent]) turns.unshift(turn);
  return turns;
}

/**
 * Returns all turns behind the one before a turn, itself included, oldest first.
 *
 * @param {Conversation} conversation
 * @param {Turn} turn
 */
export function siblings(conversation, turn) {
  return Object.values(conversation.turns).filter((other) => other.parent === turn.parent);
}

/**
 * Returns the text of a file with conversations.
 *
 * @param {Conversation[]} conversations
 */
export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, conversations }, null, 1);
}

/**
 * Returns the conversations in the text of a file, with new ids and nothing but known fields.
 *
 * @param {string} text
 * @returns {Conversation[]}
 * @throws {Error} The file is of another kind, or damaged.
 */
export function imported(text) {
  /** @type {unknown} */
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("the file is not JSON: choose one that this page has exported");
  }
  const { format, conversations } = record(file);
  if (format !== FORMAT || !Array.isArray(conversations)) {
    throw new Error(`the file is not of the format ${FORMAT}: choose one that this page has exported`);
  }
  return conversations.map((each) => readConversation(record(each)));
}

/**
 * @param {Record<string, unknown>} raw
 * @returns {Conversation}
 */
function readConversation(raw) {
  const conversation = newConversation({
    kind: raw.kind === "completion" ? "completion" : "chat",
    model: string(raw.model), system: string(raw.system), tools: string(raw.tools), schema: string(raw.schema),
    fields: record(raw.fields),
  });
  conversation.title = string(raw.title).slice(0, 200);
  const turns = Object.entries(record(raw.turns));
  if (turns.length > MOST_TURNS) throw new Error(`a conversation has more than ${MOST_TURNS} turns`);
  /** @type {Map<string, string>} New id of each old one. */
  const ids = new Map([["", ""]]);
  for (const [old, value] of turns) {
    const turn = readTurn(record(value));
    const parent = ids.get(turn.parent);
    if (parent === undefined) throw new Error("a turn follows one that is not before it in the file");
    ids.set(old, add(conversation, parent, turn.role, turn).id);
  }
  for (const [from, to] of Object.entries(record(raw.chosen))) {
    const turn = conversation.turns[ids.get(string(to)) ?? ""];
    if (turn && turn.parent === ids.get(from)) choose(conversation, turn);
  }
  return conversation;
}

/**
 * @param {Record<string, unknown>} raw
 * @returns {Turn}
 */
function readTurn(raw) {
  const role = raw.role === "assistant" || raw.role === "tool" ? raw.role : "user";
  const figures = Object.entries(record(raw.figures)).filter(([, value]) => typeof value === "number");
  return {
    id: "", parent: string(raw.parent), role, text: string(raw.text), reasoning: string(raw.reasoning),
    callId: string(raw.callId), model: string(raw.model), requestId: REQUEST_ID.test(string(raw.requestId)) ? string(raw.requestId) : "",
    end: string(raw.end) || (role === "assistant" ? "stopped" : ""), error: string(raw.error),
    calls: list(raw.calls).map((call) => ({ id: string(call.id), name: string(call.name), arguments: string(call.arguments) })),
    tokens: list(raw.tokens).map(readToken),
    figures: Object.fromEntries(figures),
  };
}

/**
 * @param {Record<string, unknown>} raw
 * @returns {Token}
 */
function readToken(raw) {
  return {
    text: string(raw.text),
    likely: list(raw.likely).map((other) => ({ text: string(other.text), logprob: Number(other.logprob) || 0 })),
    ...(typeof raw.logprob === "number" ? { logprob: raw.logprob } : {}),
    ...(ORIGINS.includes(string(raw.origin)) ? { origin: string(raw.origin) } : {}),
  };
}

/**
 * @param {unknown} value
 * @returns {Record<string, unknown>}
 */
function record(value) {
  return value && typeof value === "object" && !Array.isArray(value) ? /** @type {Record<string, unknown>} */ (value) : {};
}

/** @param {unknown} value */
function list(value) {
  return Array.isArray(value) ? value.map(record) : [];
}

/** @param {unknown} value */
function string(value) {
  return typeof value === "string" ? value.slice(0, LONGEST) : "";
}
