// What test_openai_node.py runs: the official client for Node.js against the address in its one argument.
import { createRequire } from "node:module";

const [baseURL, folder] = process.argv.slice(2);
const { OpenAI } = createRequire(`${folder}/`)("openai");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const look = { type: "function", function: { name: "look", parameters: { type: "object" } } };
const found = {};

found.models = (await client.models.list()).data.map((model) => model.id);

const answer = await client.chat.completions.create({ model: "able", messages, n: 2, logprobs: true, top_logprobs: 1 });
found.contents = answer.choices.map((choice) => choice.message.content);
found.tokens = answer.choices[0].logprobs.content.map((token) => token.token);

const stream = await client.chat.completions.create({
  model: "able",
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
found.streamed = "";
for await (const chunk of stream) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
  found.usage = chunk.usage ?? found.usage;
}

const runner = client.chat.completions.stream({ model: "able", messages, tools: [look], tool_choice: "required" });
const call = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0];
found.call = [call.function.name, JSON.parse(call.function.arguments)];

found.completion = (await client.completions.create({ model: "able", prompt: "hi", max_tokens: 2 })).choices[0].text;
found.widths = (await client.embeddings.create({ model: "vectors", input: ["a", "b"] })).data.map(
  (item) => item.embedding.length,
);

try {
  await client.chat.completions.create({ model: "able", messages, temperature: -1 });
} catch (error) {
  found.refusal = [error.constructor.name, error.status, error.param];
}

const ended = await client.chat.completions.create({
  model: "able",
  messages,
  stream: true,
  sampling_params_list: [{ tokens: 1000000 }],
});
for await (const chunk of ended) {
  if (chunk.choices[0].delta.content) break; // leaving the loop closes the connection
}

console.log(JSON.stringify(found));
