// Talks to a router with the official client, unmodified, and prints what it saw as one JSON object.
import OpenAI from "openai";

const [baseURL, text, long] = process.argv.slice(2);
const client = new OpenAI({ apiKey: "sk-x", baseURL, maxRetries: 0 });
const model = "tiny";
const seen = {};

const messages = [{ role: "user", content: text }];
const first = await client.chat.completions.create({ model, messages }).withResponse();
seen.firstRoute = first.response.headers.get("x-kvlease-route");
messages.push(first.data.choices[0].message, { role: "user", content: long });

const options = { stream: true, stream_options: { include_usage: true } };
const stream = await client.chat.completions.create({ model, messages, ...options });
let streamed = "";
for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
seen.streamed = streamed;

const response = await client.responses.create({ model, input: text });
const next = await client.responses
  .create({ model, input: long, previous_response_id: response.id })
  .withResponse();
seen.outputText = next.data.output_text;
seen.previous = next.data.previous_response_id === response.id;
seen.nextRoute = next.response.headers.get("x-kvlease-route");

const kinds = [];
for await (const event of await client.responses.create({ model, input: text, stream: true })) kinds.push(event.type);
seen.lastEvent = kinds.at(-1);

seen.models = [];
for await (const one of client.models.list()) seen.models.push(one.id);

try {
  await client.responses.create({ model, input: text, previous_response_id: "resp_unknown" });
} catch (error) {
  seen.error = { status: error.status, code: error.code, isClients: error instanceof OpenAI.NotFoundError };
}
console.log(JSON.stringify(seen));
