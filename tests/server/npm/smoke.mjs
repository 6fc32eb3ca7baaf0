// OpenAI's JavaScript client against a server whose address is the first argument; prints what came back as JSON.
import OpenAI from "openai";

const client = new OpenAI({ apiKey: "none", baseURL: `${process.argv[2]}/v1`, maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const greedy = { model: "tiny", temperature: 0, max_tokens: 8 };

const models = [];
for await (const model of await client.models.list()) models.push(model.id);

const whole = await client.chat.completions.create({ ...greedy, messages });

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({ ...greedy, messages, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const text = await client.completions.create({ ...greedy, prompt: "Hello" });

const tools = [{ type: "function", function: { name: "now" } }];
const call = await client.chat.completions.create({ model: "tiny", messages, tools, tool_choice: "required", parallel_tool_calls: false });

let refused = null;
try {
  await client.chat.completions.create({ ...greedy, messages, temperature: -1 });
} catch (error) {
  refused = { name: error.constructor.name, status: error.status, param: error.param };
}

console.log(
  JSON.stringify({
    models,
    whole: whole.choices[0].message.content,
    streamed,
    usage,
    text: text.choices[0].text,
    called: call.choices[0].message.tool_calls[0].function.name,
    with: JSON.parse(call.choices[0].message.tool_calls[0].function.arguments),
    refused,
  }),
);
