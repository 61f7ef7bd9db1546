/** Writes a request as code for the clients that people use. */

/** @typedef {import("./request.js").Call} Call */
/** @typedef {{http: string, nats: string, keyed: boolean}} Server Its URLs, and whether it needs a key. */

/** @type {Record<string, (request: Call, server: Server) => string>} */
export const SNIPPETS = { curl, openai, "nats-py": natsPy, pagewire };

/** Fields of OpenAI's requests that the official package takes as arguments; the others go into `extra_body`. */
const OPENAI = new Set([
  "model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop",
  "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format", "tools",
  "tool_choice", "parallel_tool_calls", "reasoning_effort", "user", "best_of", "echo", "suffix",
]);
/** Fields of a request over NATS beside `sampling`. */
const REQUEST = new Set([
  "prompt", "messages", "tools", "tool_choice", "parallel_tool_calls", "priority", "user", "cache_salt",
  "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "truncate_prompt_tokens",
  "add_special_tokens", "return_token_ids", "return_token_origins",
]);

/** @type {(request: Call, server: Server) => string} */
function curl({ path, body }, { http, keyed }) {
  const json = JSON.stringify({ ...body, stream: true }, null, 2).replaceAll("'", "'\\''");
  const key = keyed ? "  -H 'Authorization: Bearer KEY' \\\n" : "";
  return `curl --no-buffer ${http}${path} \\\n${key}  -H 'Content-Type: application/json' \\\n  -d '${json}'\n`;
}

/** @type {(request: Call, server: Server) => string} */
function openai({ path, body }, { http, keyed }) {
  const known = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const lines = known.map(([name, value]) => `    ${name}=${python(value, 1)},\n`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra, 1)},\n`);
  const chat = path.includes("chat");
  return (
    `from openai import OpenAI\n\nclient = OpenAI(base_url="${http}/v1", api_key="${keyed ? "KEY" : "none"}")\n` +
    `stream = client.${chat ? "chat.completions" : "completions"}.create(\n${lines.join("")}    stream=True,\n)\n` +
    `for chunk in stream:\n    if chunk.choices:\n` +
    `        print(chunk.choices[0].${chat ? "delta.content or \"\"" : "text"}, end="", flush=True)\n`
  );
}

/** @type {(request: Call, server: Server) => string} */
function natsPy({ body }, { nats, keyed }) {
  const { model, ...request } = pipelineRequest(body);
  const token = String(model).replace(/[^A-Za-z0-9_-]/g, "_");
  return (
    `import asyncio\nimport json\n\nimport nats\n\nREQUEST = ${python({ ...request, stream: true }, 0)}\n\n\n` +
    `async def main():\n    connection = await nats.connect("${nats}"${keyed ? ', user="client", password="KEY"' : ""})\n    inbox = connection.new_inbox()\n` +
    `    frames = await connection.subscribe(inbox)\n` +
    `    await connection.publish("pagewire.v1.generate.${token}", json.dumps(REQUEST).encode(), reply=inbox)\n` +
    `    async for message in frames.messages:\n        if not message.data:  # the end\n            break\n` +
    `        print(json.loads(message.data).get("text", ""), end="", flush=True)\n    await connection.close()\n\n\nasyncio.run(main())\n`
  );
}

/** @type {(request: Call, server: Server) => string} */
function pagewire({ body }, { nats, keyed }) {
  const { model, prompt, sampling, ...rest } = pipelineRequest(body);
  const named = { ...rest, model, .../** @type {Record<string, unknown>} */ (sampling) };
  const lines = Object.entries(named).map(([name, value]) => `            ${name}=${python(value, 3)},\n`);
  if (prompt !== undefined) lines.unshift(`            ${python(prompt, 3)},\n`);
  return (
    `import asyncio\n\nfrom pagewire import AsyncClient\n\n\nasync def main():\n` +
    `    async with AsyncClient("${nats}"${keyed ? ', api_key="KEY"' : ""}) as client:\n        stream = client.stream(\n${lines.join("")}        )\n` +
    `        async for delta in stream:\n            print(delta.text, end="", flush=True)\n\n\nasyncio.run(main())\n`
  );
}

/**
 * Returns an HTTP body as a request over NATS, whose sampling parameters stand in a map of their own.
 *
 * @param {Record<string, unknown>} body
 * @returns {Record<string, unknown>}
 */
function pipelineRequest(body) {
  const { model, max_completion_tokens, logprobs, top_logprobs, response_format, use_beam_search, reasoning_effort, ...others } = body;
  const request = Object.fromEntries(Object.entries(others).filter(([name]) => REQUEST.has(name)));
  const sampling = Object.fromEntries(Object.entries(others).filter(([name]) => !REQUEST.has(name)));
  const longest = max_completion_tokens ?? sampling.max_tokens;
  if (longest !== undefined) sampling.max_tokens = longest;
  else if (request.messages) sampling.max_tokens = null;
  if (logprobs !== undefined && logprobs !== false) sampling.logprobs = logprobs === true ? (top_logprobs ?? 0) : logprobs;
  if (use_beam_search) sampling.beam_width = sampling.n ?? 1;
  if (reasoning_effort) request.chat_template_kwargs = { reasoning_effort, .../** @type {object} */ (request.chat_template_kwargs) };
  const schema = /** @type {any} */ (response_format)?.json_schema?.schema;
  if (schema) sampling.structured_outputs = { json: schema };
  return { model, ...request, sampling };
}

/**
 * Returns a JSON value as Python writes it.
 *
 * @param {unknown} value
 * @param {number} depth
 * @returns {string}
 */
export function python(value, depth) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") return JSON.stringify(value);
  if (typeof value !== "object") return String(value);
  const rows = Array.isArray(value)
    ? value.map((each) => python(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${rows.join(", ")}${close}`;
  if (line.length <= 80 && !line.includes("\n")) return line;
  const indent = "    ".repeat(depth);
  return `${open}\n${rows.map((row) => `${indent}    ${row},\n`).join("")}${indent}${close}`;
}
