// The conversation that is shown: streamed answers, side by side where several are asked for.
const REDRAW = 80;  // milliseconds between two drawings of an answer that is being written
const HINTS = ["Give me three tips for a good sleep.", "What is continuous batching?", "Write a haiku about the sea."];
const shown = new Map();  // answer -> its view
let stopper = null;  // ends the answer that is being written
let edited = null;  // the turn whose message is in the composer
let following = true;  // the reader is at the bottom, and the view goes with the answer
let lastTop = 0, lastHeight = 0, lastKept = 0;

// -- following the answer ---------------------------------------------------------------------
// Scrolling up ends it, also between two drawings, and the bottom begins it again.
function noticeScroll() {
  const {scrollTop, scrollHeight, clientHeight} = at("turns");
  if (scrollTop < lastTop - 2) following = false;
  if (scrollTop + clientHeight >= lastHeight - 24) following = true;
  lastTop = scrollTop;
  lastHeight = scrollHeight;
}

function follow() {
  noticeScroll();
  if (following) at("turns").scrollTop = at("turns").scrollHeight;
  lastTop = at("turns").scrollTop;
  at("latest").hidden = following;
}

function toLatest() {
  following = true;
  at("turns").scrollTop = lastTop = at("turns").scrollHeight;
  follow();
}

at("turns").addEventListener("scroll", () => {
  noticeScroll();
  at("latest").hidden = following;
});
at("latest").addEventListener("click", toLatest);
for (const part of [at("inside"), at("turns")]) new ResizeObserver(follow).observe(part);

// -- one answer --------------------------------------------------------------------------------
class AnswerView {
  constructor(answer) {
    this.answer = answer;
    this.tokens = [];  // with their chances, where these were asked for
    this.words = el("div", {className: "words"});
    this.foot = el("div", {className: "foot"});
    this.node = el("div", {}, this.words, this.foot);
    this.drawn = 0;
    this.waits = false;
    shown.set(answer, this);
    this.draw();
  }

  later() {
    if (this.waits) return;
    this.waits = true;
    const pause = Math.max(0, this.drawn + REDRAW - performance.now());
    setTimeout(() => { this.waits = false; this.draw(); }, pause);
  }

  draw() {
    this.drawn = performance.now();
    const {text, thoughts, calls} = this.answer, parts = [];
    if (thoughts) {
      const inside = el("div", {className: "thoughts plain"}, thoughts);
      parts.push(el("details", {open: !text}, el("summary", {}, "Thoughts"), inside));
    }
    if (this.tokens.length) parts.push(el("div", {className: "plain"}, ...this.tokens.map(tokenNode)));
    else parts.push(markdown(text));
    for (const call of calls.filter(Boolean)) {
      parts.push(el("p", {}, "Calls ", el("code", {}, `${call.name}(${call.arguments})`)));
    }
    this.words.replaceChildren(...parts);
    follow();
  }

  drawFoot(turn) {
    const {answer} = this, parts = [];
    const copy = button("Copy", async () => {
      try { await navigator.clipboard.writeText(answer.text); copy.textContent = "Copied"; }
      catch { copy.textContent = "Not allowed by the browser"; }
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
    if (answer.text) parts.push(copy);
    if (answer.finish === "length") parts.push("The token limit ended it.");
    if (["", "failed"].includes(answer.finish)) parts.push("It was broken off.");
    if (answer.text && ["length", "", "stopped", "failed"].includes(answer.finish)) {
      parts.push(button("Continue", () => write(turn, answer)));
    }
    if (turn.answers.length > 1) {
      const here = turn.answers[turn.chosen] === answer;
      parts.push(here ? "The conversation goes on from this one." : button("Go on from this one", () => prefer(turn, answer)));
      this.node.classList.toggle("chosen", here);
    }
    this.foot.replaceChildren(...parts);
    this.node.classList.remove("writing");
  }
}

function tokenNode(token) {
  const share = Math.exp(token.logprob);
  const others = (token.top_logprobs || []).map((other) => `${JSON.stringify(other.token)} ${percent(Math.exp(other.logprob))}`);
  const node = el("span", {className: "token", tabIndex: 0, title: [percent(share), ...others].join("\n")}, token.token);
  node.style.borderBottomColor = `color-mix(in srgb, var(--bad) ${Math.round(100 * (1 - share))}%, transparent)`;
  return node;
}

// -- turns -------------------------------------------------------------------------------------
const turnViews = new Map();  // turn -> {node, answers, foot}

function turnView(turn) {
  const answers = el("div", {className: "answers"}), foot = el("div", {className: "foot"});
  const said = el("div", {className: "turn user"}, el("div", {className: "words plain"}, turn.text));
  const node = el("div", {}, said, el("div", {className: "turn"}, answers, foot));
  turnViews.set(turn, {node, answers, foot});
  placeAnswers(turn);
  return node;
}

function placeAnswers(turn) {
  const view = turnViews.get(turn);
  if (!view) return;
  view.answers.replaceChildren(...turn.answers.map((answer) => new AnswerView(answer).node));
  view.answers.classList.toggle("several", turn.answers.length > 1);
  drawFeet(turn);
}

function drawFeet(turn) {
  const view = turnViews.get(turn);
  if (!view || (stopper && stopper.turn === turn)) return;
  for (const answer of turn.answers) shown.get(answer)?.drawFoot(turn);
  const parts = [el("span", {className: turn.failed ? "error" : ""}, turn.note || "")];
  parts.push(button("Retry", () => again(turn)), button("Edit", () => edit(turn)));
  if (turn.request && !fleet.router) {
    parts.push(button("Where did the time go?", () => { showView("engine"); choose(turn.request); }));
  }
  view.foot.replaceChildren(...parts);
}

function prefer(turn, answer) {
  turn.chosen = turn.answers.indexOf(answer);
  drawFeet(turn);
  keep(conversation, false);
}

function openConversation(one) {
  conversation = one;
  edited = null;
  notice("");
  shown.clear();
  turnViews.clear();
  at("system").value = one.system;
  at("inside").replaceChildren(...one.turns.map(turnView));
  if (!one.turns.length) at("inside").append(hints());
  if (stopper) for (const answer of stopper.answers) shown.get(answer)?.node.classList.add("writing");
  drawList();
  showView("chat");
  toLatest();
}

function hints() {
  const each = HINTS.map((text) => button(text, () => say(text)));
  return el("div", {id: "hints"}, el("p", {}, "Ask the model something, and watch how the engine answers."), ...each);
}

function cut(turn) {  // this turn and all behind it go
  for (const gone of conversation.turns.splice(conversation.turns.indexOf(turn))) {
    turnViews.get(gone)?.node.remove();
  }
}

function say(text) {
  if (stopper) return;
  if (edited) cut(edited);
  edited = null;
  notice("");
  const turn = {text, answers: [], chosen: 0, note: ""};
  conversation.turns.push(turn);
  document.getElementById("hints")?.remove();
  at("inside").append(turnView(turn));
  following = true;
  write(turn);
}

function again(turn) {
  if (stopper) return;
  edited = turn;
  say(turn.text);
}

function edit(turn) {
  if (stopper) return;
  edited = turn;
  at("text").value = turn.text;
  at("text").focus();
  notice("You edit an earlier message: sending it replaces what follows.", "Cancel", () => {
    edited = null;
    at("text").value = "";
  });
}

// -- asking ------------------------------------------------------------------------------------
function bodyOf(turn, goesOn) {
  const before = conversation.turns.slice(0, conversation.turns.indexOf(turn));
  const messages = messagesOf(conversation, before);
  messages.push({role: "user", content: turn.text});
  const body = {messages, model: at("model").value || undefined, stream: true, stream_options: {include_usage: true}};
  if (at("most").value !== "") body.max_tokens = Number(at("most").value);
  for (const name of ["temperature", "top_p", "seed"]) {
    if (at(name).value !== "") body[name] = Number(at(name).value);
  }
  if (goesOn) {
    messages.push({role: "assistant", content: goesOn.text});
    return {...body, add_generation_prompt: false, continue_final_message: true};
  }
  if (at("logprobs").checked) Object.assign(body, {logprobs: true, top_logprobs: 3});
  return {...body, n: Number(at("n").value) || 1};
}

function takeDelta(answer, choice) {
  const delta = choice.delta || {}, view = shown.get(answer);
  const thoughts = delta.reasoning_content || delta.reasoning || "";
  answer.text += delta.content || "";
  answer.thoughts += thoughts;
  for (const call of delta.tool_calls || []) {
    const known = answer.calls[call.index] ||= {name: "", arguments: ""};
    known.name += call.function?.name || "";
    known.arguments += call.function?.arguments || "";
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  view?.tokens.push(...(choice.logprobs?.content || []));
  view?.later();
  return Boolean(delta.content || thoughts || delta.tool_calls?.length);
}

function asking(on) {
  at("send").hidden = on;
  at("stop").hidden = !on;
}

// Ask for the answers of a turn, or for more of one that ended early, and show them as they come.
async function write(turn, goesOn) {
  if (stopper) return;
  const talk = conversation;
  talk.system = at("system").value;
  const body = bodyOf(turn, goesOn);
  if (!goesOn) {
    turn.answers = Array.from({length: body.n}, () => ({text: "", thoughts: "", calls: [], finish: ""}));
    turn.chosen = 0;
  }
  const answers = goesOn ? [goesOn] : turn.answers;
  stopper = new AbortController();
  Object.assign(stopper, {talk, turn, answers});
  if (!goesOn) placeAnswers(turn);
  for (const answer of answers) {
    answer.finish = "";
    shown.get(answer).foot.replaceChildren();
    shown.get(answer).node.classList.add("writing");
  }
  turnViews.get(turn).foot.replaceChildren();
  asking(true);
  keep(talk);
  toLatest();
  const watch = {begun: performance.now(), first: 0, tokens: 0};
  let problem = "";
  try { turn.request = await readAnswers(body, answers, talk, watch); }
  catch (error) { problem = error.name === "AbortError" ? "Stopped" : error.message; }
  for (const answer of answers) {
    if (problem) answer.finish ||= problem === "Stopped" ? "stopped" : "failed";
    try { shown.get(answer)?.draw(); } catch (error) { problem ||= error.message; }
  }
  turn.failed = Boolean(problem) && problem !== "Stopped";
  turn.note = noteOf(problem, watch, answers.length);
  stopper = null;
  asking(false);
  drawFeet(turn);
  keep(talk);
  if (document.activeElement === document.body || document.activeElement === at("stop")) at("text").focus();
}

// Returns the id of the request.
async function readAnswers(body, answers, talk, watch) {
  const sent = {method: "POST", headers: headers(at("key").value), body: JSON.stringify(body), signal: stopper.signal};
  const reply = await fetch("v1/chat/completions", sent);
  if (!reply.ok) throw new Error(await refusal(reply));
  for await (const event of events(reply)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices || []) {
      const answer = answers[choice.index];
      if (answer && takeDelta(answer, choice)) watch.first ||= performance.now();
    }
    watch.tokens = event.usage?.completion_tokens || watch.tokens;
    if (performance.now() - lastKept > 1000) { keep(talk); lastKept = performance.now(); }
  }
  return reply.headers.get("x-request-id") || "";
}

function noteOf(problem, watch, count) {
  const parts = [problem], {begun, first, tokens} = watch;
  if (first) parts.push(`first token after ${ms(first - begun)}`);
  if (tokens) parts.push(`${tokens} tokens`);
  const pace = 1000 * (tokens - count) / (performance.now() - first);
  if (first && tokens > count) parts.push(`${pace.toFixed(1)} tokens/s`);
  return parts.filter(Boolean).join(" · ");
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  const other = stopper && stopper.talk !== conversation ? stopper.talk.title : "";
  if (other) notice(`“${other}” is still being answered.`, "Stop it", () => stopper?.abort());
  if (stopper || !text) return;
  at("text").value = "";
  say(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
  if (event.key === "Escape") stopper?.abort();
});
at("stop").addEventListener("click", () => stopper?.abort());
at("new").addEventListener("click", () => { openConversation(emptyConversation()); at("text").focus(); });
at("system").addEventListener("change", () => {
  conversation.system = at("system").value;
  keep(conversation, false);
});
addEventListener("pagehide", () => { if (stopper) keep(stopper.talk); });

// coming: name -> why it does not answer yet.
async function listModels(coming = new Map()) {
  try {
    const reply = await fetch("v1/models", {headers: headers(at("key").value)});
    const names = reply.ok ? (await reply.json()).data.map((model) => model.id) : [];
    const kept = at("model").value, later = [...coming].filter(([name]) => !names.includes(name));
    at("model").replaceChildren(...names.map((name) => el("option", {value: name}, name)),
      ...later.map(([name, why]) => el("option", {value: name, disabled: true}, `${name}: ${why}`)));
    at("model").value = names.includes(kept) ? kept : names[0] || "";
    at("models").hidden = names.length + later.length < 2;
  } catch { /* the line at the top says that nobody answers */ }
}
at("key").addEventListener("change", () => listModels());
