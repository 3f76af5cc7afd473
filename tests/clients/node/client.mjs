// The openai npm package against one server. Prints one JSON object: what each call gave.
// node client.mjs BASE_URL MODEL

import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const PARIS = "The capital of France is Paris.";

const schema = {
  type: "object",
  properties: {
    city: { type: "string", maxLength: 12 },
    mood: { enum: ["happy", "sad"] },
  },
  required: ["city", "mood"],
  additionalProperties: false,
};
const tool = {
  type: "function",
  function: { name: "get_weather", description: "The weather of a city.", parameters: schema },
};

function fits(value) {
  assert.deepEqual(Object.keys(value), ["city", "mood"]);
  assert.ok(["happy", "sad"].includes(value.mood) && value.city.length <= 12);
}

const checks = {
  async models() {
    const ids = [];
    for await (const card of client.models.list()) ids.push(card.id);
    assert.deepEqual(ids, [model]);
    assert.equal((await client.models.retrieve(model)).id, model);
  },

  async chat() {
    const answer = await client.chat.completions.create({
      model, messages, temperature: 0, max_tokens: 16,
    });
    assert.equal(answer.choices[0].message.content, PARIS);
    assert.equal(answer.usage.completion_tokens, 8);
    assert.ok(answer._request_id);
  },

  async stream() {
    const stream = await client.chat.completions.create({
      model, messages, temperature: 0, max_tokens: 16, stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, PARIS);
    assert.equal(usage.completion_tokens, 8);
  },

  async streamHelper() {
    const stream = client.chat.completions.stream({
      model, messages, temperature: 0, max_tokens: 16,
    });
    let deltas = "";
    stream.on("content", (delta) => { deltas += delta; });
    const final = await stream.finalChatCompletion();
    assert.equal(deltas, PARIS);
    assert.equal(final.choices[0].message.content, PARIS);
  },

  async leavesInMidStream() {
    const stream = await client.chat.completions.create({
      model, messages, max_tokens: 500, stream: true, ignore_eos: true,
    });
    for await (const chunk of stream) {
      if (chunk.choices[0].delta.content) break; // aborts the request
    }
  },

  async structuredOutput() {
    const answer = await client.chat.completions.parse({
      model, messages, temperature: 0,
      response_format: { type: "json_schema", json_schema: { name: "place", strict: true, schema } },
    });
    fits(JSON.parse(answer.choices[0].message.content));
  },

  async tools() {
    const options = {
      model, messages, temperature: 0, tools: [tool],
      tool_choice: { type: "function", function: { name: "get_weather" } },
    };
    const answer = await client.chat.completions.create(options);
    const [call] = answer.choices[0].message.tool_calls;
    assert.equal(call.function.name, "get_weather");
    fits(JSON.parse(call.function.arguments));
    const stream = client.chat.completions.stream(options);
    const streamed = (await stream.finalChatCompletion()).choices[0];
    assert.equal(streamed.finish_reason, "tool_calls");
    assert.equal(streamed.message.tool_calls[0].function.arguments, call.function.arguments);
  },

  async runTools() {
    const called = [];
    const runner = client.chat.completions.runTools({
      model, messages, temperature: 0, max_tokens: 60,
      tool_choice: { type: "function", function: { name: "get_weather" } },
      tools: [{
        type: "function",
        function: {
          ...tool.function, parse: JSON.parse,
          function: (place) => { called.push(place); return "sunny"; },
        },
      }],
    });
    await runner.done();
    assert.equal(called.length, 1);
    fits(called[0]);
  },

  async completions() {
    const answer = await client.completions.create({
      model, prompt: "1, 2, 3,", temperature: 0, max_tokens: 4, logprobs: 1,
    });
    assert.ok(answer.choices[0].text.startsWith(" 4"));
    assert.equal(answer.choices[0].logprobs.tokens.length, 4);
  },

  async errors() {
    await assert.rejects(
      client.chat.completions.create({ model, messages, temperature: 3 }),
      (error) => error instanceof OpenAI.BadRequestError
        && error.param === "temperature" && error.type === "invalid_request_error"
        && Boolean(error.requestID),
    );
    await assert.rejects(
      client.chat.completions.create({ model: "gpt-9", messages }),
      (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
    );
  },
};

const results = {};
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    results[name] = "ok";
  } catch (error) {
    results[name] = String(error?.stack ?? error);
  }
}
console.log(JSON.stringify(results));
