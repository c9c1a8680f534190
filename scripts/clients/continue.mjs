// Completes and chats as the editor plugin Continue does, with the package it talks to models with.
//
//     NODE_PATH=FOLDER/node_modules node continue.mjs http://127.0.0.1:8000

import assert from "node:assert/strict";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

// The package stands where its script's reader put it, not beside this file.
const at = join(process.env.NODE_PATH, "@continuedev/openai-adapters/dist/index.js");
const { constructLlmApi } = await import(pathToFileURL(at).href);

const url = process.argv[2];
const model = "deltafin/austen-k3";
const apiBase = url + "/v1/";
const signal = new AbortController().signal;
// Its provider for services whose completions take a suffix.
const completer = constructLlmApi({ provider: "inception", apiKey: "none", apiBase });
const talker = constructLlmApi({ provider: "openai", apiKey: "none", apiBase });
// What it ends completions at where it does not know a model by name.
const stops = [
  "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>", "</fim_middle>", "</code>",
];

async function joined(chunks) {
  let text = "";
  for await (const chunk of chunks) text += chunk.choices[0]?.delta.content ?? "";
  return text;
}

const checks = {
  async "a hole in a file is filled"() {
    for (const suffix of ["\n\nprint(add(1, 2))\n", ""]) {
      const asked = {
        model, prompt: "def add(a, b):\n    return ", suffix, max_tokens: 24, temperature: 0, presence_penalty: 1.5,
        stop: stops, stream: true,
      };
      const text = await joined(completer.fimStream(asked, signal));
      const whole = await (await fetch(apiBase + "completions", {
        method: "POST",
        body: JSON.stringify({
          ...asked, suffix: suffix || "<|endoftext|>", stop: [...stops, "\n\n", "\n \n"], stream: false,
        }),
      })).json();
      assert.equal(whole.deltafin.suffix, "chat");
      assert.equal(text, whole.choices[0].text);
    }
  },

  async "a chat is answered, streamed and whole"() {
    const asked = { model, messages: [{ role: "user", content: "Who are you?" }], max_tokens: 24, seed: 3 };
    const text = await joined(talker.chatCompletionStream({ ...asked, stream: true }, signal));
    const whole = await talker.chatCompletionNonStream({ ...asked, stream: false }, signal);
    assert.ok(text);
    assert.equal(text, whole.choices[0].message.content);
  },

  async "a tool is called"() {
    const parameters = { type: "object", properties: { path: { enum: ["a.rs", "b.rs"] } }, required: ["path"] };
    const asked = {
      model, messages: [{ role: "user", content: "Read a file." }], max_tokens: 400, stream: true,
      tools: [{ type: "function", function: { name: "read_file", parameters } }], tool_choice: "required",
    };
    let given = "";
    for await (const chunk of talker.chatCompletionStream(asked, signal)) {
      for (const call of chunk.choices[0]?.delta.tool_calls ?? []) {
        if (call.index === 0) given += call.function.arguments ?? "";
      }
    }
    assert.ok(["a.rs", "b.rs"].includes(JSON.parse(given).path), given);
  },

  async "the models are listed"() {
    assert.deepEqual((await talker.list()).map((one) => one.id), [model]);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`${name}: ok`);
}
