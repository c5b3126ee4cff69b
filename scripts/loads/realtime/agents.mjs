// @openai/agents-realtime asks aloud and in writing: node agents.mjs FOLDER URL MODEL QUESTION.pcm
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url, model, question] = process.argv.slice(2);
const found = createRequire(`${folder}/`).resolve("@openai/agents-realtime");
const { OpenAIRealtimeWebSocket, RealtimeAgent, RealtimeSession } = await import(pathToFileURL(found));

const address = `${url}/realtime?model=${model}`;
const agent = new RealtimeAgent({ name: "assistant" });
const session = new RealtimeSession(agent, { transport: new OpenAIRealtimeWebSocket({ url: address }), model });
const answers = [];
let bytes = 0;
session.on("error", (event) => {
  console.error(JSON.stringify(event, (_, value) => (value instanceof Error ? value.message : value)));
  process.exit(1);
});
session.on("audio", (event) => (bytes += event.data.byteLength));
session.transport.on("*", (event) => {
  if (event.type === "response.output_audio_transcript.done") answers.push({ text: event.transcript, bytes });
  if (event.type !== "response.done") return;
  bytes = 0;
  if (answers.length === 1) return session.sendMessage("What is the capital of France?");
  console.log(JSON.stringify(answers));
  process.exit(0);
});
await session.connect({ apiKey: "none", url: address });
const sound = readFileSync(question);
for (let start = 0; start < sound.length; start += 9600) {
  const piece = sound.subarray(start, start + 9600);
  session.sendAudio(piece.buffer.slice(piece.byteOffset, piece.byteOffset + piece.length));
}
