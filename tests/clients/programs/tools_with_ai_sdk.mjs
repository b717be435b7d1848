// Program that prints results of the Vercel AI SDK as JSON: an agent with a function, whole and streamed, and an object.
// Arguments: URL of a service, model name.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "kvasir",
  baseURL: `${url}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const cities = [];
const city = z.enum(["Oslo", "Paris"]);
const weather = tool({
  description: "Return the weather of a city.",
  inputSchema: z.object({ city }),
  execute: async ({ city }) => {
    cities.push(city);
    return `It is sunny in ${city}.`;
  },
});
const asked = {
  model: provider(name),
  prompt: "What is the weather in Paris?",
  maxOutputTokens: 100,
  temperature: 0,
  maxRetries: 0,
};
const agent = {
  ...asked,
  tools: { weather },
  stopWhen: stepCountIs(3),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
};

const whole = await generateText(agent);
const stream = streamText(agent);
let text = "";
for await (const piece of stream.textStream) text += piece;
const output = Output.object({ schema: z.object({ city, sunny: z.boolean() }) });
const report = (await generateText({ ...asked, output })).output;
const streamed = streamText({ ...asked, output });
for await (const _ of streamed.textStream);
const usage = await stream.totalUsage;
if (usage.outputTokens !== whole.totalUsage.outputTokens) throw new Error(JSON.stringify(usage));
if (JSON.stringify(await streamed.output) !== JSON.stringify(report)) throw new Error("the streamed object differs");
console.log(JSON.stringify({ chat: { cities, answers: [whole.text, text], report } }));
