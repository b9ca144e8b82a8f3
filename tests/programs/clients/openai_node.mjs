// The openai package for node: chat, streams, tools, parsed answers, responses, errors, aborts.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import { assertWeather, baseURL, check, model, question, runChecks, waitIdle } from "./checks.mjs";

const client = new OpenAI({ baseURL, apiKey: "none" });
const messages = [{ role: "user", content: question }];
const chat = { model, messages, seed: 1, max_tokens: 40 };
const weather = z.strictObject({ city: z.string().regex(/^[A-Z][a-z]{1,9}$/), days: z.int().min(1).max(9) });
const parameters = z.toJSONSchema(weather);
const tools = [{ type: "function", function: { name: "get_weather", parameters, strict: true } }];

check("models are listed", async () => {
  const found = [];
  for await (const each of client.models.list()) found.push(each.id);
  assert.deepEqual(found, [model]);
});

check("streamed pieces joined equal the whole", async () => {
  const whole = await client.chat.completions.create(chat);
  assert.equal(whole.choices[0].finish_reason, "stop");
  const stream = await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert(text.length > 0);
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

check("a tool call goes round trip", async () => {
  const offered = { ...chat, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 100 };
  const answer = await client.chat.completions.create(offered);
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  assertWeather(call.function.arguments);
  const streamed = await client.chat.completions.stream(offered).finalChatCompletion();
  assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  const turn = [...messages, answer.choices[0].message, { role: "tool", tool_call_id: call.id, content: "sunny" }];
  const last = await client.chat.completions.create({ ...chat, messages: turn, tools, tool_choice: "none" });
  assert(last.choices[0].message.content);
});

check("a runner calls the function", async () => {
  const seen = [];
  const get_weather = { name: "get_weather", parameters, parse: JSON.parse, function: (given) => seen.push(given) && "sunny" };
  const runner = client.chat.completions.runTools(
    {
      ...chat,
      max_tokens: 200,
      tools: [{ type: "function", function: get_weather }],
      tool_choice: "required",
      parallel_tool_calls: false,
    },
    { maxChatCompletions: 1 },
  );
  await runner.done();
  assertWeather(seen[0]);
});

check("a parsed answer follows its schema", async () => {
  const format = zodResponseFormat(weather, "weather");
  const answer = await client.chat.completions.parse({ ...chat, max_tokens: 200, response_format: format });
  assertWeather(answer.choices[0].message.parsed);
});

check("responses answer and stream", async () => {
  const ask = { model, input: question, max_output_tokens: 60, temperature: 0 };
  const whole = await client.responses.create(ask);
  assert(whole.output_text);
  let text = "";
  let last;
  for await (last of await client.responses.create({ ...ask, stream: true }))
    if (last.type === "response.output_text.delta") text += last.delta;
  assert.equal(text, whole.output_text);
  assert.equal(last.type, "response.completed");
});

check("errors map to the classes", async () => {
  const wrong = client.chat.completions.create({ ...chat, temperature: 9 });
  await assert.rejects(wrong, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  await assert.rejects(client.chat.completions.create({ ...chat, model: "none" }), OpenAI.NotFoundError);
  const long = [{ role: "user", content: "word ".repeat(5000) }];
  const overflow = client.chat.completions.create({ ...chat, messages: long });
  await assert.rejects(overflow, (error) => error.code === "context_length_exceeded");
});

check("a timeout and an aborted stream free the server", async () => {
  const long = { model, messages, max_tokens: 1500, ignore_eos: true, temperature: 1.5 };
  const slow = client.chat.completions.create(long, { timeout: 300, maxRetries: 0 });
  await assert.rejects(slow, OpenAI.APIConnectionTimeoutError);
  await waitIdle();
  const stream = await client.chat.completions.create({ ...long, stream: true });
  for await (const _ of stream) break;
  await waitIdle();
});

await runChecks();
