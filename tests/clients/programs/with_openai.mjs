// Program that prints results of openai for Node as JSON: completions, chat, usage, embeddings and exceptions.
// Arguments: URL of a service, URL of a full service that requires an API key, model name, API key.
import OpenAI from "openai";

const [url, fullUrl, model, fullKey] = process.argv.slice(2);
const [client, full, stranger] = [[url, "none"], [fullUrl, fullKey], [fullUrl, "none"]].map(
  ([at, apiKey]) => new OpenAI({ baseURL: `${at}/v1`, apiKey, maxRetries: 0 }),
);
const messages = [{ role: "user", content: "Tell me a story." }];

async function errorOf(call) {
  try {
    return [String(await call())];
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    return [error.constructor.name, error.status];
  }
}

const stream = await client.completions.create({
  model,
  prompt: "Once upon a time",
  max_tokens: 20,
  temperature: 0,
  stream: true,
});
let text = "";
for await (const chunk of stream) text += chunk.choices[0].text;
const chat = await client.chat.completions.create({ model, messages, max_tokens: 20, temperature: 0 });
const said = {
  text,
  chat: chat.choices[0].message.content,
  usage: [chat.usage.prompt_tokens, chat.usage.completion_tokens],
  vector: (await client.embeddings.create({ model, input: ["Once upon a time"] })).data[0].embedding,
  models: (await full.models.list()).data.map((card) => card.id),
  errors: [
    await errorOf(() => client.completions.create({ model: "no-such-model", prompt: "Once" })),
    await errorOf(() => client.completions.create({ model, prompt: "Once", max_tokens: -1 })),
    await errorOf(() => full.chat.completions.create({ model, messages, max_tokens: 1 })),
    await errorOf(() => stranger.models.list()),
  ],
};
console.log(JSON.stringify(said));
