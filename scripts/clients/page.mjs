// Uses the web page as a person does, in headless Chromium, and takes pictures of it.
//
//     NODE_PATH=FOLDER/node_modules node page.mjs http://127.0.0.1:8000 PICTURES [CHROMIUM]

import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(process.env.NODE_PATH + "/").href);
const { chromium } = require("playwright-core");
const [url, pictures, program = "/usr/bin/chromium"] = process.argv.slice(2);
mkdirSync(pictures, { recursive: true });

const profile = mkdtempSync(join(tmpdir(), "deltafin-page-"));
const flags = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
const browser = await chromium.launchPersistentContext(profile, {
  executablePath: program, headless: true, args: flags, colorScheme: "light", viewport: { width: 1280, height: 800 },
});
const page = browser.pages()[0] ?? await browser.newPage();
page.setDefaultTimeout(60_000);
const troubles = [];
page.on("console", (message) => message.type() === "error" && troubles.push(message.text()));
page.on("pageerror", (error) => troubles.push(String(error)));
page.on("request", (request) => {
  const address = request.url();
  if (!address.startsWith(url) && !address.startsWith("data:")) troubles.push("asked elsewhere: " + address);
});

const picture = (name) => page.screenshot({ path: join(pictures, name + ".png") });
const health = async () => (await fetch(url + "/health")).json();
async function settle(what, holds) {
  for (let look = 0; !(await holds()); look++) {
    assert.ok(look < 1200, what);
    await new Promise((done) => setTimeout(done, 50));
  }
}
async function settings(values) {
  await page.getByRole("button", { name: "Settings" }).click();
  for (const [label, value] of Object.entries(values)) {
    if (label === "Thinking") await page.locator("#effort").selectOption(value);
    else await page.getByLabel(label, { exact: true }).fill(value);
  }
  await page.getByRole("button", { name: "Done" }).click();
}
/** Whether any dot of the picture has more colour than the empty grid. */
const coloured = () => page.$eval("#picture", (canvas) => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let i = 0; i < data.length; i += 4) if (Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 60) found++;
  return found;
});
const fits = async () => assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "wider than its window");

const checks = {
  async "it says what is served, and waits"() {
    await page.goto(url);
    await page.getByText("What should it think about?").waitFor();
    await page.locator("#model.ready").waitFor();
    await fits();
    await picture("1-wide-light-empty");
  },

  async "a message is answered, and the machine is seen at work"() {
    await settings({ "Most tokens": "400", Thinking: "max", Seed: "7", Temperature: "0.8" });
    await page.getByLabel("Message").fill("Who are you? Tell me about your family and the house you live in.");
    await page.keyboard.press("Enter");
    assert.ok(await page.getByRole("button", { name: "Stop" }).isVisible());
    await settle("the picture stays dark", async () => (await coloured()) > 20);
    await settle("nobody says that it works", async () => /reading|generating/.test(await page.locator("#doing").textContent()));
    await picture("2-wide-light-working");
    await page.locator("article.assistant footer").waitFor();
    const told = await page.locator("article.assistant footer").textContent();
    assert.match(told, /tokens in .*experts.*seed 7/, told);
    await settle("no bytes are counted", async () => (await page.locator("#n-disk").textContent()) !== "0" || (await page.locator("#n-hub").textContent()) !== "0");
    await picture("3-wide-light-answered");
  },

  async "markup of the user's stays text"() {
    await settings({ "Most tokens": "4", Thinking: "none" });
    await page.getByLabel("Message").fill("<img src=x onerror=document.title='broken'> ```\n<b>code</b>\n```");
    await page.getByRole("button", { name: "Send" }).click();
    await settle("no answer", async () => (await page.locator("article.assistant footer").count()) === 2);
    assert.equal(await page.title(), "Deltafin");
    assert.equal(await page.locator("article img, article b").count(), 0);
  },

  async "Escape stops, and the machine with it"() {
    await settings({ "Most tokens": "4000", Thinking: "max" });
    await page.getByLabel("Message").fill("Tell me a very long story.");
    await page.keyboard.press("Enter");
    await settle("it does not begin", async () => (await health()).running === 1);
    await page.keyboard.press("Escape");
    await page.getByText("stopped").waitFor();
    await settle("it works on for nobody", async () => (await health()).running === 0);
    assert.ok(await page.getByLabel("Message").evaluate((field) => field === document.activeElement), "the cursor is lost");
  },

  async "settings outlive the page, a key does not outlive its tab, and errors are shown"() {
    await settings({ Temperature: "0.35", "API key": "k" });
    // A dialog tells of its end after it has ended.
    await settle("settings are not kept", () => page.evaluate(() => (localStorage.getItem("deltafin") ?? "").includes("0.35")));
    await page.reload();
    await page.getByRole("button", { name: "Settings" }).click();
    assert.equal(await page.getByLabel("Temperature").inputValue(), "0.35");
    assert.ok(!(await page.evaluate(() => JSON.stringify(localStorage))).includes('"k"'));
    await picture("4-wide-light-settings");
    await page.getByRole("button", { name: "Done" }).click();
    await page.evaluate(() => { document.getElementById("temperature").value = "9"; });
    await page.getByRole("button", { name: "Who are you?" }).click();
    await page.locator("article.error").waitFor();
    assert.match(await page.locator("article.error").textContent(), /temperature/);
    // A refusal is a line in the browser's log, and expected here.
    const refused = troubles.findIndex((trouble) => trouble.includes("400"));
    if (refused >= 0) troubles.splice(refused, 1);
    await settings({ Temperature: "0.8", "API key": "" });
  },

  async "thinking is folded, and unfolded by keyboard while it goes on"() {
    await page.getByRole("button", { name: "New chat" }).click();
    // The small model was taught to answer at once: what would close its thinking is held back.
    await page.route("**/v1/chat/completions", (route) => {
      const asked = { ...route.request().postDataJSON(), logit_bias: { 2052: -20 } };
      return route.continue({ postData: JSON.stringify(asked) });
    });
    await settings({ "Most tokens": "90", Thinking: "max", Seed: "3" });
    await page.getByLabel("Message").fill("Who are you?");
    await page.keyboard.press("Enter");
    const thought = page.locator("details.thought");
    await thought.waitFor();
    const open = () => thought.evaluate((one) => one.open);
    const shown = () => thought.locator(".text").isVisible();
    assert.ok(!(await open()) && !(await shown()), "it is not folded");
    await thought.locator("summary").focus();
    await page.keyboard.press("Enter");
    assert.ok((await open()) && (await shown()), "a key does not unfold it");
    await settle("no answer", async () => (await page.locator("article.assistant footer").count()) === 1);
    assert.ok(await shown(), "it was folded again by what came after");
    assert.ok((await thought.locator(".text").textContent()).length > 20);
    assert.match(await thought.locator("summary").textContent(), /^Thought/);
    await picture("9-wide-light-unfolded");
    await thought.locator("summary").focus();
    await page.keyboard.press("Space");
    assert.ok(!(await shown()), "a key does not fold it");
    await page.unroute("**/v1/chat/completions");
  },

  async "a limit pauses, says so, and is raised in place"() {
    await page.getByRole("button", { name: "New chat" }).click();
    const limit = (max_bytes) => fetch(url + "/limits", { method: "POST", body: JSON.stringify({ max_bytes }) });
    assert.ok((await limit(1)).ok);
    await settings({ "Most tokens": "60", Thinking: "none", Seed: "4" });
    await page.getByLabel("Message").fill("What is in the garden?");
    await page.keyboard.press("Enter");
    await page.getByText("Nothing is lost").waitFor();
    await settle("nobody says why", async () => /paused: the limit of/.test(await page.locator(".await").textContent()));
    assert.match(await page.locator("#doing").textContent(), /paused/);
    await picture("10-wide-light-paused");
    await page.locator("#most").fill("lots");
    await page.getByRole("button", { name: "Go on" }).click();
    await page.getByText("must be a number of bytes").waitFor();
    const refused = troubles.findIndex((trouble) => trouble.includes("400"));
    if (refused >= 0) troubles.splice(refused, 1);
    await page.setViewportSize({ width: 390, height: 844 });
    await fits();
    await picture("11-phone-light-paused");
    await page.setViewportSize({ width: 1280, height: 800 });
    await page.locator("#most").fill("1TB");
    await page.keyboard.press("Enter");
    await settle("no answer", async () => (await page.locator("article.assistant footer").count()) === 1);
    await page.locator("#raise").waitFor({ state: "hidden" });
    assert.ok((await limit(null)).ok);
  },

  async "it is usable by keyboard alone"() {
    await page.getByRole("button", { name: "New chat" }).click();
    await page.evaluate(() => document.activeElement.blur());
    const reached = new Set();
    for (let press = 0; press < 14; press++) {
      await page.keyboard.press("Tab");
      reached.add(await page.evaluate(() => document.activeElement.id || document.activeElement.textContent));
    }
    for (const id of ["fresh", "adjust", "talk", "text", "send"]) assert.ok(reached.has(id), `${id} of ${[...reached]}`);
  },

  async "the same in the dark, and on a phone"() {
    await settings({ "Most tokens": "220", Thinking: "max", Seed: "3" });
    await page.emulateMedia({ colorScheme: "dark" });
    await page.getByLabel("Message").fill("Tell me a short story.");
    await page.keyboard.press("Enter");
    await settle("the picture stays dark", async () => (await coloured()) > 20);
    await picture("5-wide-dark-working");
    await page.locator("article.assistant footer").waitFor();
    await page.setViewportSize({ width: 390, height: 844 });
    await fits();
    await picture("6-phone-dark-answered");
    await page.emulateMedia({ colorScheme: "light" });
    await page.getByRole("button", { name: "Details" }).click();
    await page.getByLabel("Message").fill("And then?");
    await page.getByRole("button", { name: "Send" }).click();
    await settle("the picture stays dark", async () => (await coloured()) > 20);
    await fits();
    await picture("7-phone-light-working");
    await page.getByRole("button", { name: "Less" }).click();
    await picture("8-phone-light-talk");
    await settle("no answer", async () => (await page.locator("article.assistant footer").count()) === 2);
  },
};

try {
  for (const [name, check] of Object.entries(checks)) {
    await check();
    console.log(`${name}: ok`);
  }
  assert.deepEqual(troubles, []);
} catch (error) {
  await picture("failed").catch(() => {});
  throw error;
} finally {
  await browser.close();
  rmSync(profile, { recursive: true, force: true });
}
