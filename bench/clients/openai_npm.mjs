// openai for npm: chats, streams, tools, parse with zod, responses, embeddings.
//
//   node bench/clients/openai_npm.mjs FOLDER URL MODEL
import { CITY, WEATHER_SCHEMA, check, expect, expectEqual, expectWeather, packages, tell } from "./seen.mjs";

const [folder, url, model] = process.argv.slice(2);
const { require, version } = packages(folder);
const { OpenAI } = require("openai");
const { zodResponseFormat, zodFunction } = require("openai/helpers/zod");
const { z } = require("zod");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const poem = [{ role: "user", content: "Write a short poem about the sea." }];
const short = { model, messages: poem, temperature: 0, max_tokens: 32 };
const weather = { type: "function", function: { name: "get_weather", parameters: WEATHER_SCHEMA } };
const Person = z.object({ name: z.string(), age: z.number().int(), job: z.enum(["doctor", "lawyer", "farmer"]) });
const Weather = z.object({ city: z.string(), unit: z.enum(["celsius", "fahrenheit"]) });
const ask = { ...short, messages: [{ role: "user", content: CITY }], max_tokens: 64 };

await check("models", async () => {
  const listed = (await client.models.list()).data.map((one) => one.id);
  expect(listed.includes(model), `${model} is not among ${listed}`);
});

await check("chat_and_stream", async () => {
  const whole = await client.chat.completions.create(short);
  expectEqual(whole.usage.completion_tokens, 32, "tokens");
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...short, stream: true })) {
    streamed += chunk.choices[0]?.delta.content ?? "";
  }
  expectEqual(streamed, whole.choices[0].message.content, "streamed text");
  const final = await client.chat.completions.stream(short).finalContent();
  expectEqual(final, streamed, "text of the helper");
});

await check("tools", async () => {
  const fields = { ...ask, tools: [weather], tool_choice: "required" };
  const call = (await client.chat.completions.create(fields)).choices[0].message.tool_calls[0];
  expectEqual(call.function.name, "get_weather", "name");
  expectWeather(call.function.arguments);
  const streamed = await client.chat.completions.stream(fields).finalChatCompletion();
  expectEqual(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments, "streamed");
});

await check("run_tools", async () => {
  const called = [];
  const tool = zodFunction({
    name: "get_weather",
    description: "The present weather of a city.",
    parameters: Weather,
    function: (values) => {
      called.push(values);
      return "31 degrees and sunny";
    },
  });
  // so small a model calls it again and again: two turns
  const runner = client.chat.completions.runTools({ ...ask, tools: [tool] }, { maxChatCompletions: 2 });
  const roles = [];
  runner.on("message", (message) => roles.push(message.role));
  await runner.done();
  expectEqual(called[0], { city: "Paris", unit: "celsius" }, "what the tool was called with");
  expectEqual(roles.slice(0, 3), ["assistant", "tool", "assistant"], "turns");
});

await check("parse", async () => {
  const answer = await client.chat.completions.parse({
    ...short,
    messages: [{ role: "user", content: "Ann Lee is 34 and a lawyer." }],
    max_tokens: 80,
    response_format: zodResponseFormat(Person, "person"),
  });
  const { age, job } = answer.choices[0].message.parsed;
  expectEqual([age, job], [34, "lawyer"], "parsed");
});

await check("responses", async () => {
  const fields = { model, input: poem[0].content, temperature: 0, max_output_tokens: 32 };
  const whole = await client.responses.create(fields);
  const chat = await client.chat.completions.create(short);
  expectEqual(whole.output_text, chat.choices[0].message.content, "text of responses and chats");
  let streamed = "";
  for await (const event of await client.responses.create({ ...fields, stream: true })) {
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  expectEqual(streamed, whole.output_text, "streamed text");
});

await check("responses_tools", async () => {
  const tool = { type: "function", name: "get_weather", parameters: WEATHER_SCHEMA, strict: true };
  const fields = { model, input: CITY, temperature: 0, max_output_tokens: 80, tools: [tool], tool_choice: "required" };
  const call = (await client.responses.create(fields)).output.find((item) => item.type === "function_call");
  expectWeather(call.arguments);
  const final = await client.responses.stream(fields).finalResponse();
  const streamed = final.output.find((item) => item.type === "function_call");
  expectEqual(streamed.arguments, call.arguments, "streamed arguments");
});

await check("embeddings", async () => {
  const answer = await client.embeddings.create({ model, input: ["The cat sat.", "Rates rose."] });
  expectEqual(answer.data.length, 2, "rows");
  for (const { embedding } of answer.data) {
    const norm = Math.hypot(...embedding);
    expect(Math.abs(norm - 1) < 1e-3, `norm ${norm}`);
  }
});

await check("errors", async () => {
  for (const [status, more] of [[404, { model: "no-such-model" }], [400, { temperature: -1 }]]) {
    const error = await client.chat.completions.create({ ...short, ...more }).then(() => null, (e) => e);
    expectEqual(error?.status, status, "status");
  }
});

await check("abort", async () => {
  const stream = await client.chat.completions.create({ ...short, max_tokens: 2000, stream: true });
  let chunks = 0;
  for await (const _ of stream) if (++chunks === 5) break; // which aborts it
  const until = Date.now() + 20_000;
  let load = 1;
  while (load && Date.now() < until) load = (await (await fetch(`${url}/load`)).json()).server_load;
  expectEqual([chunks, load], [5, 0], "answers under way behind it");
});

tell("openai (npm)", version("openai"));
