// AI SDK: its class for OpenAI (responses by default, chats), and the one for compatible servers.
//
//   node bench/clients/ai_sdk_npm.mjs FOLDER URL MODEL
import { CITY, check, expect, expectEqual, expectWeather, packages, tell } from "./seen.mjs";

const [folder, url, model] = process.argv.slice(2);
const { require, version } = packages(folder);
const ai = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");
globalThis.AI_SDK_LOG_WARNINGS = false;
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "local", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const short = { prompt: "Write a short poem about the sea.", temperature: 0, maxOutputTokens: 32, maxRetries: 0 };
const Person = z.object({ name: z.string(), age: z.number().int(), job: z.enum(["doctor", "lawyer", "farmer"]) });
const ask = { ...short, prompt: CITY, maxOutputTokens: 96 };
const classes = { responses: openai(model), chat: openai.chat(model), compatible: compatible(model) };

function weather(called) {
  return ai.tool({
    description: "The present weather of a city.",
    inputSchema: z.object({ city: z.string(), unit: z.enum(["celsius", "fahrenheit"]) }),
    execute: (values) => {
      called.push(values);
      return "31 degrees and sunny";
    },
  });
}

for (const [name, chosen] of Object.entries(classes)) {
  await check(`${name}_text`, async () => {
    const whole = await ai.generateText({ ...short, model: chosen });
    expectEqual(whole.usage.outputTokens, 32, "tokens");
    expectEqual(whole.finishReason, "length", "why it ended");
    let streamed = "";
    for await (const piece of ai.streamText({ ...short, model: chosen }).textStream) streamed += piece;
    expectEqual(streamed, whole.text, "streamed text");
  });

  await check(`${name}_object`, async () => {
    const prompt = "Ann Lee is 34 and a lawyer.";
    const output = ai.Output.object({ schema: Person });
    const answer = await ai.generateText({ ...short, model: chosen, prompt, maxOutputTokens: 80, output });
    expectEqual([answer.output.age, answer.output.job], [34, "lawyer"], "object");
  });

  await check(`${name}_tool`, async () => {
    const called = [];
    const fields = { ...ask, model: chosen, tools: { get_weather: weather(called) }, stopWhen: ai.stepCountIs(3) };
    // so small a model calls it again and again otherwise
    const prepareStep = ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : {});
    const answer = await ai.generateText({ ...fields, prepareStep });
    expectWeather(called[0] ?? "{}");
    expect(answer.steps.length > 1 && answer.text.includes("31"), `answer ${answer.text}`);
    const one = { ...fields, toolChoice: "required", stopWhen: ai.stepCountIs(1) };
    const calls = await ai.streamText(one).toolCalls;
    expectWeather(calls[0].input);
  });
}

await check("embeddings", async () => {
  const { embeddings } = await ai.embedMany({
    model: openai.embedding(model),
    values: ["The cat sat.", "Rates rose."],
    maxRetries: 0,
  });
  expectEqual(embeddings.length, 2, "rows");
  for (const row of embeddings) {
    const norm = Math.hypot(...row);
    expect(Math.abs(norm - 1) < 1e-3, `norm ${norm}`);
  }
});

tell("AI SDK", `${version("ai")}, @ai-sdk/openai ${version("@ai-sdk/openai")}`);
