// The Vercel AI SDK on its three providers, with zod: node tests/clients/scripted/vercel.mjs URL.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert";
import { z } from "zod";

const url = process.argv[2];
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const models = {
  "openai, responses": openai("scripted"),
  "openai, chat": openai.chat("scripted"),
  "openai-compatible": createOpenAICompatible({ name: "pagewire", baseURL: `${url}/v1`, supportsStructuredOutputs: true })("scripted"),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("scripted"),
};
const tools = {
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async () => "42 degrees",
  }),
};
const schema = z.object({ name: z.string(), tags: z.record(z.string(), z.number()), inhabitants: z.number().int() });
// A server that stores nothing takes whole conversations, not references to its earlier answers.
const settings = { maxRetries: 0, maxOutputTokens: 500, providerOptions: { openai: { store: false } } };

async function callsATool(model) {
  const messages = [{ role: "user", content: "COMPUTE the weather in Paris." }];
  const first = await generateText({ model, tools, messages, stopWhen: stepCountIs(3), ...settings });
  assert.equal(first.text, "The result is 42.");
  messages.push(...first.response.messages, { role: "user", content: "RECALL the result." });
  const second = streamText({ model, tools, messages, ...settings, onError() {} });
  assert.equal(await second.text, "The result was 42.");
}

async function fillsAForm(model) {
  const { object } = await generateObject({ model, schema, prompt: "DESCRIBE a city in JSON.", ...settings });
  assert.equal(typeof object.inhabitants, "number");
}

const works = [];
for (const [provider, model] of Object.entries(models)) {
  for (const [feature, run] of [["a tool in two turns", callsATool], ["generateObject with zod", fillsAForm]]) {
    try {
      await run(model);
      works.push(`${provider}: ${feature}`);
    } catch (error) {
      console.error(provider, feature, error?.responseBody ?? error);
      process.exitCode = 1;
    }
  }
}
console.log(works.join(", "));
