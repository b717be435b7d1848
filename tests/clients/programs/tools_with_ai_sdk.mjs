// Program that prints results of the Vercel AI SDK as JSON: an agent with a function, whole and streamed, and an object.
// Arguments: URL of a service, model name.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const args = { name: "kvasir", baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  chat: createOpenAICompatible({ ...args, includeUsage: true, supportsStructuredOutputs: true })(name),
  responses: createOpenAI(args)(name),
  messages: createAnthropic(args)(name),
};
let cities = [];
const city = z.enum(["Oslo", "Paris"]);
const weather = tool({
  description: "Return the weather of a city.",
  inputSchema: z.object({ city }),
  execute: async ({ city }) => {
    cities.push(city);
    return `It is sunny in ${city}.`;
  },
});
const question = { prompt: "What is the weather in Paris?", maxOutputTokens: 100, temperature: 0, maxRetries: 0 };
const agent = {
  ...question,
  tools: { weather },
  stopWhen: stepCountIs(3),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
};

async function talk(model) {
  cities = [];
  const whole = await generateText({ ...agent, model });
  const stream = streamText({ ...agent, model });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  const usage = await stream.totalUsage;
  if (usage.outputTokens !== whole.totalUsage.outputTokens) throw new Error(JSON.stringify(usage));
  const asked = { ...question, model, output: Output.object({ schema: z.object({ city, sunny: z.boolean() }) }) };
  const report = (await generateText(asked)).output;
  const streamed = streamText(asked);
  for await (const _ of streamed.textStream);
  const same = JSON.stringify(await streamed.output) === JSON.stringify(report);
  if (!same) throw new Error("the streamed object differs");
  return { cities, answers: [whole.text, text], report };
}

const said = {};
for (const [api, model] of Object.entries(models)) said[api] = await talk(model);
console.log(JSON.stringify(said));
