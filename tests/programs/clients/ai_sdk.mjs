// Vercel's AI SDK with its OpenAI provider (responses and chat) and its provider for compatible servers.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import { assertWeather, baseURL, check, model, question, runChecks, waitIdle } from "./checks.mjs";

const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "llama", baseURL, includeUsage: true, supportsStructuredOutputs: true });
const models = { responses: openai(model), chat: openai.chat(model), compatible: compatible(model) };
const ask = { prompt: question, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const weather = z.strictObject({ city: z.string().regex(/^[A-Z][a-z]{1,9}$/), days: z.int().min(1).max(9) });

for (const [name, each] of Object.entries(models)) {
  check(`${name}: text has usage and a finish reason`, async () => {
    const answer = await generateText({ ...ask, model: each });
    assert(answer.text);
    assert.equal(answer.finishReason, "stop");
    assert(answer.usage.inputTokens > 0 && answer.usage.outputTokens > 0);
    const cut = await generateText({ ...ask, model: each, maxOutputTokens: 2 });
    assert.equal(cut.finishReason, "length");
  });

  check(`${name}: streamed pieces joined equal the whole`, async () => {
    const pieces = [];
    const stream = streamText({ ...ask, model: each });
    for await (const piece of stream.textStream) pieces.push(piece);
    assert(pieces.length > 1);
    assert.equal(pieces.join(""), (await generateText({ ...ask, model: each })).text);
    assert((await stream.usage).outputTokens > 0);
  });

  check(`${name}: a tool is called and its result is answered`, async () => {
    const seen = [];
    const execute = async (given) => seen.push(given) && "sunny";
    const answer = await generateText({
      ...ask,
      model: each,
      maxOutputTokens: 150,
      tools: { weather: tool({ description: "The weather.", inputSchema: weather, execute }) },
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
      stopWhen: stepCountIs(2),
    });
    assertWeather(seen[0]);
    assert.equal(answer.steps.length, 2);
    assert.equal(answer.steps[0].finishReason, "tool-calls");
    assert(answer.text);
  });

  check(`${name}: a streamed tool call has its input`, async () => {
    const tools = { weather: tool({ description: "The weather.", inputSchema: weather }) };
    const stream = streamText({ ...ask, model: each, maxOutputTokens: 150, tools, toolChoice: "required" });
    const [call] = await stream.toolCalls;
    assertWeather(call.input);
  });

  check(`${name}: an object follows its schema, whole and streamed`, async () => {
    const output = Output.object({ schema: weather });
    const answer = await generateText({ ...ask, model: each, maxOutputTokens: 200, output });
    assertWeather(answer.output);
    const stream = streamText({ ...ask, model: each, maxOutputTokens: 200, output });
    let last;
    for await (last of stream.partialOutputStream);
    assert.deepEqual(last, answer.output);
  });

  check(`${name}: errors have their status`, async () => {
    const overflow = generateText({ ...ask, model: each, prompt: "word ".repeat(5000) });
    await assert.rejects(overflow, (error) => APICallError.isInstance(error) && error.statusCode === 400);
  });
}

check("an aborted stream frees the server", async () => {
  const stop = new AbortController();
  const text = { type: "array", items: { type: "integer" }, minItems: 400 };
  const stream = streamText({
    ...ask,
    model: compatible(model),
    maxOutputTokens: 1500,
    providerOptions: { llama: { response_format: { type: "json_schema", json_schema: { name: "x", schema: text } } } },
    abortSignal: stop.signal,
    onError: () => {},
  });
  for await (const _ of stream.textStream) {
    stop.abort();
    break;
  }
  await waitIdle();
});

await runChecks();
