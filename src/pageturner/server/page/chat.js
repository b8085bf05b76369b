// The conversation: streamed answers, side by side where several are asked for.
const at = (id) => document.getElementById(id);
const turns = [];  // {text, answers: [{text, thoughts, calls}], node}
let stopper = null;

function headers(key) {
  const sent = {"content-type": "application/json"};
  if (key) sent.authorization = "Bearer " + key;
  return sent;
}

async function refused(reply) {
  try { return (await reply.json()).error?.message || `status ${reply.status}`; } catch { return `status ${reply.status}`; }
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

function bodyOf(until) {
  const messages = at("system").value ? [{role: "system", content: at("system").value}] : [];
  for (const turn of turns.slice(0, until + 1)) {
    messages.push({role: "user", content: turn.text});
    if (turn !== turns[until] && turn.answers[0]?.text) messages.push({role: "assistant", content: turn.answers[0].text});
  }
  const body = {messages, model: at("model").value || undefined, n: Number(at("n").value), max_tokens: Number(at("most").value), stream: true, stream_options: {include_usage: true}};
  for (const name of ["temperature", "top_p", "seed"]) if (at(name).value !== "") body[name] = Number(at(name).value);
  if (at("logprobs").checked) { body.logprobs = true; body.top_logprobs = 3; }
  return body;
}

class AnswerView {
  constructor() {
    this.text = ""; this.thoughts = ""; this.calls = []; this.tokens = [];
    this.words = el("div", {className: "words"}); this.note = el("small", {});
    this.node = el("div", {}, this.words, this.note);
    this.drawn = 0; this.waits = false;
  }
  take(choice) {
    const delta = choice.delta || {};
    this.text += delta.content || "";
    this.thoughts += delta.reasoning_content || "";
    for (const call of delta.tool_calls || []) {
      const known = this.calls[call.index] ||= {name: "", arguments: ""};
      known.name += call.function?.name || ""; known.arguments += call.function?.arguments || "";
    }
    this.tokens.push(...(choice.logprobs?.content || []));
    if (!this.waits) { this.waits = true; setTimeout(() => { this.waits = false; this.draw(); }, Math.max(0, this.drawn + 80 - performance.now())); }
  }
  draw() {
    this.drawn = performance.now();
    const parts = [];
    if (this.thoughts) parts.push(el("details", {open: !this.text}, el("summary", {}, "Thoughts"), el("div", {className: "thoughts plain"}, this.thoughts)));
    if (this.tokens.length) parts.push(el("div", {className: "plain"}, ...this.tokens.map(tokenNode)));
    else parts.push(markdown(this.text));
    for (const call of this.calls.filter(Boolean)) parts.push(el("div", {className: "tools"}, el("code", {}, `${call.name}(${call.arguments})`)));
    this.words.replaceChildren(...parts);
  }
}

function tokenNode(told) {
  const share = Math.exp(told.logprob);
  const others = (told.top_logprobs || []).map((one) => `${JSON.stringify(one.token)} ${(100 * Math.exp(one.logprob)).toFixed(1)} %`).join("\n");
  const node = el("span", {className: "token", tabIndex: 0, title: `${(100 * share).toFixed(1)} %\n${others}`}, told.token);
  node.style.borderBottomColor = `color-mix(in srgb, var(--bad) ${Math.round(100 * (1 - share))}%, transparent)`;
  return node;
}

function small(text, does) { const button = el("button", {type: "button", className: "quiet"}, text); button.addEventListener("click", does); return button; }

async function answer(turn) {
  if (stopper) return;
  stopper = new AbortController(); at("send").disabled = true; at("stop").disabled = false;
  const begun = performance.now(), body = bodyOf(turns.indexOf(turn));
  const views = Array.from({length: body.n}, () => new AnswerView());
  turn.answers = views;
  turn.replies.replaceChildren(...views.map((view) => view.node));
  let first = 0, usage = null, problem = "", id = "", finish = "";
  try {
    const reply = await fetch("v1/chat/completions", {method: "POST", headers: headers(at("key").value), body: JSON.stringify(body), signal: stopper.signal});
    if (!reply.ok) throw new Error(await refused(reply));
    id = reply.headers.get("x-request-id") || "";
    for await (const told of events(reply)) {
      if (told.error) throw new Error(told.error.message);
      for (const choice of told.choices || []) { first ||= performance.now(); finish = choice.finish_reason || finish; views[choice.index]?.take(choice); }
      usage = told.usage || usage;
    }
  } catch (error) { problem = error.name === "AbortError" ? "stopped" : error.message; }
  try { views.forEach((view) => view.draw()); } catch (error) { problem ||= error.message; }
  const tokens = usage?.completion_tokens, pace = tokens > body.n ? (tokens - body.n) / (performance.now() - first) * 1000 : 0;
  const note = [problem || (finish === "length" ? "ended at the token limit" : ""), first ? `first token after ${Math.round(first - begun)} ms` : "", tokens ? `${tokens} tokens` : "", pace ? `${pace.toFixed(1)} tokens/s` : ""];
  const last = views[views.length - 1].note;
  last.className = problem && problem !== "stopped" ? "error" : "";
  last.replaceChildren(el("span", {}, note.filter(Boolean).join(", ")), small("Retry", () => again(turn)), small("Edit", () => edit(turn)));
  if (id && !problem) last.append(small("Where did the time go?", () => choose(id)));
  stopper = null; at("send").disabled = false; at("stop").disabled = true;
  if (document.activeElement === document.body || document.activeElement === at("stop")) at("text").focus();
}

function cut(turn) {  // the turn and all behind it go
  for (const gone of turns.splice(turns.indexOf(turn))) gone.node.remove();
}

function say(text) {
  const replies = el("div", {className: "answers"});
  const node = el("div", {}, el("div", {className: "turn user"}, el("div", {className: "words plain"}, text)), el("div", {className: "turn"}, replies));
  const turn = {text, answers: [], node, replies};
  turns.push(turn); at("turns").append(node);
  node.scrollIntoView({block: "end"});
  return answer(turn);
}

function again(turn) { if (!stopper) { const text = turn.text; cut(turn); say(text); } }
function edit(turn) { if (!stopper) { at("text").value = turn.text; cut(turn); at("text").focus(); } }

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (stopper || !text) return;
  at("text").value = ""; say(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); at("ask").requestSubmit(); }
  if (event.key === "Escape") stopper?.abort();
});
at("stop").addEventListener("click", () => stopper?.abort());
at("clear").addEventListener("click", () => { stopper?.abort(); if (turns.length) cut(turns[0]); at("text").focus(); });

async function models() {
  try {
    const told = await (await fetch("v1/models", {headers: headers(at("key").value)})).json();
    at("model").replaceChildren(...(told.data || []).map((one) => el("option", {value: one.id}, one.id)));
  } catch { /* the line at the top says that nobody answers */ }
}
at("key").addEventListener("change", models);
models();
