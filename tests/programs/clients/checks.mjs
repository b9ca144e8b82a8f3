// What the programs for node share: the server's address, and checks that print one line each.

import assert from "node:assert/strict";

export const url = process.env.CLIENT_SERVER_URL ?? "http://127.0.0.1:8000";
export const baseURL = `${url}/v1`;
export const model = "llama-demo";
export const question = "What is 7 + 5?";

const registered = [];

/** Register a check; `name` is the line that `runChecks` prints. */
export function check(name, body) {
  registered.push([name, body]);
}

/** Run every registered check in order, print a line each, and exit with status 1 if one failed. */
export async function runChecks() {
  let failed = 0;
  for (const [name, body] of registered) {
    try {
      await body();
      console.log(`ok ${name}`);
    } catch (error) {
      failed += 1;
      console.error(error);
      console.log(`FAILED ${name}: ${JSON.stringify(String(error).slice(0, 400))}`);
    }
  }
  process.exit(failed ? 1 : 0);
}

/** Wait until no request runs and no cache block is in use, as after a disconnect. */
export async function waitIdle() {
  for (const deadline = Date.now() + 30_000; ; ) {
    const seen = await (await fetch(`${url}/props`)).json();
    if (!(seen.requests_running || seen.requests_waiting || seen.blocks_used)) return;
    assert(Date.now() < deadline, `the server is not idle: ${JSON.stringify(seen)}`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

export function assertWeather(value) {
  const found = typeof value === "string" ? JSON.parse(value) : value;
  assert.deepEqual(Object.keys(found).sort(), ["city", "days"]);
  assert(/^[A-Z][a-z]{1,9}$/.test(found.city));
  assert(found.days >= 1 && found.days <= 9);
}
