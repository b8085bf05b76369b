"use strict";
const make = (tag, text, parts = [], attributes = {}) => {
  const node = document.createElement(tag);
  if (text !== null && text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...parts);
  return node;
};
const base = location.href.replace(/\/docs\/?([?#].*)?$/, "");
const key = document.getElementById("key");
let spec = {};
document.getElementById("document").href = base + "/openapi.json";

const found = (schema) => {
  if (!schema || !schema.$ref) return schema || {};
  return schema.$ref.split("/").slice(1).reduce((place, name) => place[name], spec);
};
const told = (value) => JSON.stringify(value);

// the type of a field in a few words
const kind = (schema, depth = 0) => {
  if (schema.$ref) {
    const whole = found(schema);
    return whole.anyOf || whole.enum ? kind(whole, depth + 1) : schema.$ref.split("/").pop();
  }
  if (schema.enum) return schema.enum.filter((one) => one !== null).map(told).join(" | ") || "null";
  if (schema.anyOf) return depth > 2 ? "..." : [...new Set(schema.anyOf.map((one) => kind(one, depth + 1)))].filter((one) => one !== "null").join(" | ");
  const types = [schema.type ?? "anything"].flat().filter((one) => one !== "null");
  let text = types.join(" | ") || "null";
  if (schema.items && types.includes("array")) text = text.replace("array", "array of " + kind(schema.items, depth + 1));
  const least = schema.minimum ?? schema.exclusiveMinimum, most = schema.maximum;
  if (least !== undefined || most !== undefined)
    text += ", " + (schema.exclusiveMinimum !== undefined ? "above " : "") + (least ?? "") + " to " + (most ?? "");
  if (schema.maxLength) text += ", at most " + schema.maxLength + " characters";
  if (schema.maxItems) text += ", at most " + schema.maxItems;
  if (schema.default !== undefined) text += ", default " + told(schema.default);
  return text;
};

const rows = (properties, required) => make("div", null, [make("table", null, [
  make("tr", null, ["field", "type", ""].map((text) => make("th", text))),
  ...properties.map(([name, schema]) => make("tr", null, [
    make("td", name, [], required.includes(name) ? { class: "needed" } : {}),
    make("td", kind(schema)), make("td", schema.description ?? ""),
  ])),
])], { class: "wide" });

const fieldsOf = (body) => {
  const all = Object.entries(body.properties ?? {}), required = body.required ?? [];
  const needed = ([name]) => required.includes(name) ? 0 : 1;
  const own = all.filter(([, one]) => !one["x-neutral"]).sort((a, b) => needed(a) - needed(b));
  const neutral = all.filter(([, one]) => one["x-neutral"]);
  const parts = [make("h3", "Fields"), rows(own, required)];
  if (neutral.length) parts.push(make("details", null, [
    make("summary", neutral.length + " fields that are not supported, and taken only where they change nothing"),
    make("div", null, [rows(neutral, [])]),
  ]));
  return parts;
};

// a body to begin with: what is required, and what makes an answer short
const example = (body) => {
  const has = body.properties ?? {}, made = {};
  const text = "The capital of France is", said = [{ role: "user", content: "Say hello." }];
  if (has.model && has.model.enum) made.model = has.model.enum[0];
  if (has.messages && kind(has.messages) !== "null" && kind(has.messages) !== "anything") made.messages = said;
  else if (has.prompt && !has.prompt["x-neutral"]) made.prompt = text;
  if (has.input && !has.input["x-neutral"]) made.input = text;
  if (has.tokens) made.tokens = [1, 2, 3];
  for (const name of ["max_tokens", "max_output_tokens"])
    if (has[name] && has[name].maximum && !has[name]["x-neutral"]) made[name] = 32;
  if (has.options) made.options = { num_predict: 32 };
  return JSON.stringify(made, null, 2);
};

const quoted = (text) => "'" + text.replaceAll("'", "'\\''") + "'";
const trial = (method, path, operation, body) => {
  const variables = [...path.matchAll(/\{(\w+)\}/g)].map(([, name]) => name);
  const inputs = Object.fromEntries(variables.map((name) => [name, make("input", null, [], { "aria-label": name, placeholder: name })]));
  const text = body ? make("textarea", null, [], { spellcheck: "false", "aria-label": "body of the request" }) : null;
  if (text) text.value = example(body);
  const curl = make("pre"), out = make("pre", "", [], { hidden: "" }), status = make("p", "", [], { "aria-live": "polite" });
  const keyed = (operation.security ?? []).length > 0;
  const target = () => base + path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(inputs[name].value || name));
  const show = () => {
    const parts = ["curl"];
    if (method !== "GET") parts.push("-X " + method);
    parts.push(quoted(target()));
    if (keyed) parts.push("-H 'Authorization: Bearer KEY'");
    if (text) parts.push("-H 'Content-Type: application/json'", "-d " + quoted(text.value));
    curl.textContent = parts.join(" \\\n  ");
  };
  const send = async () => {
    out.hidden = false; out.textContent = ""; status.textContent = "waiting ..."; status.className = "";
    const headers = {};
    if (text) headers["Content-Type"] = "application/json";
    if (key.value) headers.Authorization = "Bearer " + key.value;
    try {
      const answer = await fetch(target(), { method, headers, body: text ? text.value : undefined });
      status.textContent = answer.status + " " + answer.statusText;
      status.className = answer.ok ? "good" : "bad";
      const reader = answer.body.getReader(), decoder = new TextDecoder();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        out.textContent += decoder.decode(value, { stream: true });
      }
      try { out.textContent = JSON.stringify(JSON.parse(out.textContent), null, 2); } catch { /* a stream */ }
    } catch (error) { status.textContent = String(error); status.className = "bad"; }
  };
  for (const one of [...Object.values(inputs), ...(text ? [text] : [])]) one.addEventListener("input", show);
  const copy = make("button", "Copy as curl", [], { type: "button" }), go = make("button", "Send", [], { type: "button" });
  copy.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(curl.textContent); copy.textContent = "Copied"; }
    catch { getSelection().selectAllChildren(curl); copy.textContent = "Selected: copy it"; }
    setTimeout(() => { copy.textContent = "Copy as curl"; }, 1500);
  });
  go.addEventListener("click", send);
  show();
  return [make("h3", "Try it"), ...Object.values(inputs), ...(text ? [text] : []), make("p", null, [go, copy]), curl, status, out];
};

const answersOf = (operation) => {
  const list = Object.entries(operation.responses).map(([status, one]) => {
    const answer = one.content ? Object.entries(one.content).map(([type, of]) => type + (of.schema && (of.schema.$ref || of.schema["x-event"]) ? " " + (of.schema.$ref || of.schema["x-event"].$ref).split("/").pop() : "")).join(", ") : "";
    return make("tr", null, [make("td", status), make("td", answer), make("td", one.description)]);
  });
  return make("details", null, [make("summary", "Answers and errors"), make("div", null, [make("table", null, list)])]);
};

const shown = (method, path, operation) => {
  const whole = make("details", null, [make("summary", null, [make("b", method), make("code", path), "  ", make("span", operation.summary, [], { class: "soft" })])], { id: operation.operationId });
  whole.addEventListener("toggle", () => {
    if (whole.children.length > 1) return;
    const content = operation.requestBody ? Object.values(operation.requestBody.content)[0].schema : null;
    const body = content ? found(content) : null, inside = make("div");
    const headers = (operation.parameters ?? []).map(found).filter((one) => one.in !== "path").map((one) => [one.name, { description: one.description, ...one.schema }]);
    if (body) inside.append(...fieldsOf(body));
    if (headers.length) inside.append(make("details", null, [make("summary", "Headers and parameters"), make("div", null, [rows(headers, [])])]));
    inside.append(answersOf(operation), ...trial(method, path, operation, body));
    whole.append(inside);
  });
  return whole;
};

const load = async () => {
  const about = document.getElementById("about");
  try {
    const answer = await fetch(base + "/openapi.json");
    if (!answer.ok) throw new Error("the server says " + answer.status + ": " + (await answer.text()));
    spec = await answer.json();
  } catch (error) { about.textContent = String(error); return; }
  about.textContent = spec.info.version + ". " + spec.info.description;
  const groups = new Map();
  for (const [path, methods] of Object.entries(spec.paths))
    for (const [method, operation] of Object.entries(methods)) {
      const group = operation.tags[0];
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(shown(method.toUpperCase(), path, operation));
    }
  for (const [name, operations] of groups) document.getElementById("operations").append(make("h2", name), ...operations);
  if (location.hash) { const here = document.getElementById(location.hash.slice(1)); if (here) { here.open = true; here.scrollIntoView(); } }
};
load();
