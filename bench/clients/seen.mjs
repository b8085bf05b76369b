// What a script of a client saw, as seen.py has it: named checks, expectations, one line of JSON.
import { createRequire } from "node:module";
import { join } from "node:path";

let held = 0;
const checks = {};

/** Packages and their versions from the folder in which the client was installed. */
export function packages(folder) {
  const require = createRequire(join(folder, "package.json"));
  return { require, version: (name) => require(join(folder, "node_modules", name, "package.json")).version };
}

/** what: said where it did not hold. */
export function expect(value, what) {
  if (!value) throw new Error(what);
  held += 1;
}

export function expectEqual(one, other, what) {
  const [a, b] = [JSON.stringify(one), JSON.stringify(other)];
  expect(a === b, `${what}: ${String(a).slice(0, 300)} is not ${String(b).slice(0, 300)}`);
}

/** Arguments, or their text, are those of the tool. */
export function expectWeather(given) {
  const values = typeof given === "string" ? JSON.parse(given) : given;
  const right = JSON.stringify(Object.keys(values).sort()) === '["city","unit"]';
  expect(
    right && typeof values.city === "string" && ["celsius", "fahrenheit"].includes(values.unit),
    `not the arguments of get_weather: ${JSON.stringify(given)}`,
  );
}

/** Run a check and note what came of it. */
export async function check(name, run) {
  held = 0;
  const begin = Date.now();
  try {
    await run();
    checks[name] = held > 0 ? true : "expected nothing";
  } catch (error) {
    const cause = error?.cause?.message ? ` (${error.cause.message})` : "";
    checks[name] = `${error?.name}: ${error?.message}${cause}`.replace(/\s+/g, " ").slice(0, 400);
  }
  console.error(`${name}: ${checks[name] === true ? "ok" : checks[name]} (${(Date.now() - begin) / 1000} s)`);
}

export function tell(client, version) {
  console.log(JSON.stringify({ client, version, checks, figure: "" }));
}

export const CITY = "What is the weather in Paris, in celsius? Use the tool.";
export const WEATHER_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
