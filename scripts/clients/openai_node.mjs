// Drives a Deltafin server with OpenAI's own Node client, streamed and not.
//
//     node openai_node.mjs http://127.0.0.1:8000 REPLIES
//
// Every reply is written to the file REPLIES, a JSON object a line, for shapes.py to look at.

import assert from "node:assert/strict";
import { appendFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The package stands where its script's reader put it, not beside this file.
const require = createRequire(pathToFileURL(process.env.NODE_PATH + "/").href);
const OpenAI = require("openai").default ?? require("openai");

const [url, replies] = process.argv.slice(2);
const model = "deltafin/austen-k3";
const user = [{ role: "user", content: "Who are you?" }];
writeFileSync(replies, "");

/** Writes down each reply that is read to its end. */
async function recorded(address, options) {
  const reply = await fetch(address, options);
  const [mine, theirs] = reply.body ? reply.body.tee() : [null, null];
  const path = new URL(address.url ?? address).pathname;
  if (mine) {
    pending.push(new Response(mine).text().then((body) => appendFileSync(replies, JSON.stringify({
      path, status: reply.status, type: reply.headers.get("content-type") ?? "", body,
    }) + "\n"), () => {}));
  }
  return new Response(theirs, reply);
}
const pending = [];

const client = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0, timeout: 600_000, fetch: recorded });

async function joined(stream) {
  const said = { content: "", reasoning: "", calls: [], finish: null, usage: null };
  for await (const chunk of stream) {
    said.usage = chunk.usage ?? said.usage;
    const choice = chunk.choices[0];
    if (!choice) continue;
    said.content += choice.delta.content ?? "";
    said.reasoning += choice.delta.reasoning_content ?? "";
    for (const part of choice.delta.tool_calls ?? []) {
      said.calls[part.index] ??= { name: part.function.name, arguments: "" };
      said.calls[part.index].arguments += part.function.arguments ?? "";
    }
    said.finish = choice.finish_reason ?? said.finish;
  }
  return said;
}

const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Bath", "London"] }, days: { type: "integer", minimum: 1, maximum: 7 } },
      required: ["city", "days"],
    },
  },
};

const checks = {
  async models() {
    const listed = [];
    for await (const one of client.models.list()) listed.push(one.id);
    assert.deepEqual(listed, [model]);
    assert.equal((await client.models.retrieve("austen-k3")).id, model);
  },

  async "chat both ways"() {
    for (const sampling of [{ temperature: 0 }, { seed: 11 }, { top_p: 0.5, seed: 3, frequency_penalty: 1 }]) {
      const ask = { model, messages: user, max_tokens: 40, ...sampling };
      const whole = await client.chat.completions.create(ask);
      const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
      const said = await joined(stream);
      assert.equal(said.content, whole.choices[0].message.content);
      assert.equal(said.reasoning, whole.choices[0].message.reasoning_content ?? "");
      assert.equal(said.finish, whole.choices[0].finish_reason);
      assert.equal(said.usage.completion_tokens, whole.usage.completion_tokens);
      assert.ok(whole.usage.deltafin.experts.requested > 0);
    }
  },

  async "completions both ways"() {
    const ask = { model, prompt: ["It is a truth", "Mr. Darcy"], max_tokens: 8, temperature: 0, echo: true, logprobs: 1 };
    const whole = await client.completions.create(ask);
    const texts = ["", ""];
    for await (const chunk of await client.completions.create({ ...ask, stream: true })) {
      for (const choice of chunk.choices) texts[choice.index] += choice.text;
    }
    assert.deepEqual(texts, whole.choices.map((choice) => choice.text));
    assert.ok(texts[1].startsWith("Mr. Darcy"));
    const middle = await client.completions.create({ model, prompt: "a = ", suffix: "\nprint(a)", max_tokens: 8 });
    assert.deepEqual(middle.deltafin, { suffix: "chat" });
  },

  async "tools are called, streamed and run"() {
    const ask = { model, messages: user, tools: [weather], tool_choice: "required", seed: 2, max_tokens: 600 };
    const whole = (await client.chat.completions.create(ask)).choices[0];
    assert.equal(whole.finish_reason, "tool_calls");
    for (const call of whole.message.tool_calls) {
      const given = JSON.parse(call.function.arguments);
      assert.ok(["Bath", "London"].includes(given.city) && given.days >= 1 && given.days <= 7);
    }
    const said = await joined(await client.chat.completions.create({ ...ask, stream: true }));
    assert.deepEqual(said.calls, whole.message.tool_calls.map((call) => ({ name: call.function.name, arguments: call.function.arguments })));
    // The client's own loop: it calls the function and sends its result.
    const days = [];
    const runner = client.chat.completions.runTools({
      model, messages: user, max_tokens: 300, seed: 2, tool_choice: { type: "function", function: { name: "weather" } },
      tools: [{ type: "function", function: { ...weather.function, parse: JSON.parse, function: (given) => { days.push(given.days); return "rain"; } } }],
    });
    await runner.finalContent().catch(() => {});
    assert.equal(days.length, 1);
  },

  async "answers fit their schema"() {
    const schema = { type: "object", properties: { age: { type: "integer", minimum: 0, maximum: 120 } }, required: ["age"], additionalProperties: false };
    const made = await client.chat.completions.parse({
      model, messages: user, max_tokens: 400, reasoning_effort: "none",
      response_format: { type: "json_schema", json_schema: { name: "p", schema, strict: true } },
    });
    const age = made.choices[0].message.parsed?.age ?? JSON.parse(made.choices[0].message.content).age;
    assert.ok(age >= 0 && age <= 120);
  },

  async responses() {
    const ask = { model, input: "Who are you?", temperature: 0, max_output_tokens: 30 };
    const whole = await client.responses.create(ask);
    let text = "";
    for await (const event of await client.responses.create({ ...ask, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, whole.output_text);
    let made = await client.responses.create({ ...ask, background: true });
    while (["queued", "in_progress"].includes(made.status)) {
      await new Promise((done) => setTimeout(done, 50));
      made = await client.responses.retrieve(made.id);
    }
    assert.equal(made.output_text, whole.output_text);
    await client.responses.delete(made.id);
    await assert.rejects(client.responses.retrieve(made.id), OpenAI.NotFoundError);
  },

  async refusals() {
    await assert.rejects(client.chat.completions.create({ model, messages: user, wibble: 1 }), (error) =>
      error instanceof OpenAI.BadRequestError && error.param === "wibble" && error.code === "unknown_parameter");
    await assert.rejects(client.embeddings.create({ model, input: "x" }), OpenAI.BadRequestError);
  },

  async "leaving ends it"() {
    const stream = await client.chat.completions.create({ model, messages: user, stream: true, max_tokens: 4000 });
    for await (const chunk of stream) if (chunk.choices[0]?.delta.reasoning_content) break;
    stream.controller.abort();
    for (let look = 0; ; look++) {
      if ((await (await fetch(url + "/health")).json()).running === 0) break;
      assert.ok(look < 200, "it works on for nobody");
      await new Promise((done) => setTimeout(done, 50));
    }
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`${name}: ok`);
}
await Promise.all(pending.splice(0, pending.length - 1));
