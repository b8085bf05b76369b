// What the engine does: asked for while the page is seen, and drawn from its last steps.
const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
const EVERY = calm ? 1000 : 400;  // milliseconds
const LATELY = 60;  // seconds of first tokens that are counted
const TENANTS = ["#4c7fa8", "#b0733a", "#5c8f5a", "#8b6aa8", "#a85c6a", "#7a7a4a", "#4a8f8f", "#8a6f5a"];
const SQUARE = 9, SQUARES_HIGH = 7;
const tenants = new Map();
const batch = new Batch(at("batch"));
let paused = false, busy = false, chosen = "", chosenChoice = 0;

function tenantColour(name) {
  if (!tenants.has(name)) tenants.set(name, TENANTS[tenants.size % TENANTS.length]);
  return tenants.get(name);
}

// -- figures -----------------------------------------------------------------------------------
// In milliseconds: of requests that ended lately, and of those that still go on.
function firstTokens(seen) {
  const open = seen.requests.filter((one) => one.ttft_s !== null && one.age_s - one.ttft_s < LATELY);
  return [...seen.first_tokens_ms, ...open.map((one) => 1000 * one.ttft_s)];
}

function tilesOf(seen) {
  const now = seen.figures, hits = now.prompt_tokens ? now.cached_tokens / now.prompt_tokens : 0;
  return [
    ["Tokens/s", batch.pace().toFixed(0)],
    ["Running / waiting", `${now.running || 0} / ${now.waiting || 0}`],
    ["TTFT p50 / p99", spread(firstTokens(seen))],
    ["ITL p50 / p99", spread(batch.gaps())],
    ["KV in use", percent((now.blocks_used || 0) / (now.blocks_total || 1))],
    ["Prefix hits", percent(hits)],
  ];
}

function othersOf(now) {
  const found = [];
  if (now.draft_tokens) found.push(["Drafts accepted", percent(now.accepted_tokens / now.draft_tokens)]);
  if (now.goodput_rate || now.goodput_share < 1) found.push(["Targets met, last minute", percent(now.goodput_share)]);
  if (now.preemptions) found.push(["Preemptions", String(now.preemptions)]);
  const shares = [["kernels", "Time in kernels"], ["read", "Memory bandwidth used"], ["compute", "Arithmetic used"]];
  for (const [name, label] of shares) {
    if (now["share_" + name] !== undefined) found.push([label, percent(now["share_" + name])]);
  }
  return found;
}

function drawFigures(tiles, others) {
  const pair = ([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value));
  if (at("figures").children.length !== tiles.length) {
    at("figures").replaceChildren(...tiles.map(pair));
    for (const term of at("figures").querySelectorAll("dt")) explained(term, term.textContent);
  }
  tiles.forEach(([, value], i) => { at("figures").children[i].lastChild.textContent = value; });
  at("more").hidden = !others.length;
  at("others").replaceChildren(...others.map(pair));
}

// -- KV memory ---------------------------------------------------------------------------------
function drawBlocks(seen) {
  const {blocks_total: total = 0, blocks_used: used = 0, blocks_shared: shared = 0, blocks_cached: cached = 0, block_size: size = 1} = seen.figures;
  const pinned = Math.min(cached + used, seen.figures.pinned || 0);
  const [pen, width] = canvasOf(at("blocks"), SQUARE * SQUARES_HIGH + 1);
  if (!total) return;
  const across = Math.max(10, Math.floor(width / SQUARE)), count = across * SQUARES_HIGH;
  const each = total / count;
  // what is in use is never invisible, however much memory there is
  const squares = (blocks) => blocks ? Math.max(1, Math.round(blocks / each)) : 0;
  const fills = [];
  for (const [name, share] of sharesOfTenants(seen, size)) fills.push([squares(used * share), tenantColour(name)]);
  fills.push([squares(pinned), colour("good")], [squares(Math.max(0, cached - pinned)), colour("wait")]);
  const order = fills.flatMap(([n, fill]) => Array(n).fill(fill)).slice(0, count);
  pen.strokeStyle = colour("rule");
  for (let i = 0; i < count; i++) {
    const x = (i % across) * SQUARE, y = Math.floor(i / across) * SQUARE;
    pen.fillStyle = order[i] || "transparent";
    if (order[i]) pen.fillRect(x, y, 7, 7);
    else pen.strokeRect(x + 0.5, y + 0.5, 6, 6);
  }
  const parts = [`${used} of ${total} blocks in use`];
  if (shared) parts.push(`${shared} shared`);
  parts.push(`${cached} cached`);
  if (pinned) parts.push(`${pinned} pinned`);
  parts.push(`${total - used - cached} free`);
  const {state_blocks_total: states = 0, state_blocks_used: live = 0, state_blocks_cached: kept = 0} = seen.figures;
  if (states) parts.push(`and beside them ${live} of ${states} recurrent states in use, ${kept} kept`);
  at("blocks-text").textContent = parts.join(", ") + ".";
  at("blocks").setAttribute("aria-label", "KV memory: " + parts.join(", "));
  const amount = each < 1 ? `1 block of ${size} tokens` : `${each.toFixed(each < 10 ? 1 : 0)} blocks of ${size} tokens`;
  at("scale").replaceChildren(`A square is ${amount}:`,
    el("span", {className: "key decode"}, "in use"), el("span", {className: "key waiting"}, "cached"),
    el("span", {className: "key pinned"}, "pinned"), el("span", {className: "key free"}, "free"));
}

// [tenant, its share of the blocks in use], reckoned from the tokens of its requests.
function sharesOfTenants(seen, size) {
  const held = new Map();
  for (const one of seen.requests) {
    if (one.state === "held") continue;
    const blocks = Math.ceil((one.prompt_tokens + one.output_tokens) / size);
    held.set(one.tenant, (held.get(one.tenant) || 0) + blocks);
  }
  const sum = [...held.values()].reduce((a, b) => a + b, 0) || 1;
  return [...held].map(([name, blocks]) => [name, blocks / sum]);
}

// -- requests ----------------------------------------------------------------------------------
function drawRequests(seen) {
  const body = at("requests").tBodies[0], focused = document.activeElement?.dataset?.request;
  at("request-count").textContent = seen.unfinished ? `(${seen.unfinished})` : "";
  at("nobody").hidden = seen.unfinished > 0;
  at("requests").hidden = !seen.unfinished;
  body.replaceChildren(...seen.requests.slice(0, 24).map((one) => {
    const several = seen.requests.some((other) => other.request === one.request && other.id !== one.id);
    const name = one.request.slice(0, 8) + (several ? ` · ${one.choice + 1}` : "");
    const link = button(name, () => choose(one.request, one.choice));
    link.dataset.request = one.id;
    const cached = one.cached_tokens ? ` (${one.cached_tokens} cached)` : "";
    const cells = [one.state, `${one.prompt_tokens}${cached}`, String(one.output_tokens), `${one.age_s.toFixed(1)} s`];
    const first = el("td", {}, link, one.tenant ? ` ${one.tenant}` : "");
    return el("tr", {}, first, ...cells.map((text) => el("td", {}, text)));
  }));
  if (focused) body.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
}

function choose(name, choice = 0) {
  chosen = name;
  chosenChoice = choice;
  showTimeline(name, true);
}

const PART_COLOURS = {queue: "wait", waiting: "wait", prefill: "prefill", decode: "decode", delivery: "soft", accept: "soft", step_under_way: "soft", restart: "bad", preempted: "bad"};
let asksTimeline = false;

// clicked: now; else it is under way, and looked at again.
async function showTimeline(name, clicked) {
  if (asksTimeline && !clicked) return;
  asksTimeline = true;
  try {
    const reply = await fetch(`v1/requests/${encodeURIComponent(name)}/timeline`, {headers: headers(at("key").value)});
    const body = reply.ok ? await reply.json() : null;
    if (name !== chosen) return;  // another one was clicked meanwhile
    if (body) {
      const ours = body.choices.findLast((one) => one.index === chosenChoice) || body.choices[0];
      drawTimeline(name, ours, clicked);
      return;
    }
    if (reply.status === 404 && !clicked) return;  // it has just ended, and is told the next time
    chosen = "";
    at("request").replaceChildren(el("p", {className: "note error"}, await refusal(reply)));
  } finally { asksTimeline = false; }
}

function drawTimeline(name, told, clicked) {
  const {unfinished} = told, whole = unfinished ? told.so_far_ms : told.e2e_ms;
  if (!unfinished) chosen = "";
  const first = told.ttft_ms === null ? "no token yet" : `first token after ${ms(told.ttft_ms)}`;
  const title = `Where the time of ${name.slice(0, 8)} ${unfinished ? "goes" : "went"}`;
  const line = `${ms(whole)} ${unfinished ? `so far, ${told.state}` : "in all"}, ${first}`;
  at("request").replaceChildren(el("h3", {}, title), el("p", {className: "note"}, line),
    ...partsOfTime(told), el("p", {className: "note"}, waitedBehind(name, told)));
  if (clicked) at("request").scrollIntoView({block: "nearest"});
}

function partsOfTime(told) {
  const parts = Object.entries(told.parts_ms).filter(([, value]) => value > 0.05);
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  const bar = el("div", {className: "bar", role: "img", ariaLabel: "Parts of its time"});
  const list = el("div", {className: "parts"});
  for (const [part, value] of parts.sort((a, b) => b[1] - a[1])) {
    const kind = Object.keys(PART_COLOURS).find((one) => part.includes(one));
    const fill = kind ? colour(PART_COLOURS[kind]) : tenantColour("part " + part);
    const piece = el("span", {title: `${part}: ${ms(value)}`}), mark = el("i");
    piece.style.flexBasis = `${100 * value / total}%`;
    piece.style.background = mark.style.background = fill;
    if (part.startsWith("others_")) piece.style.opacity = mark.style.opacity = 0.55;
    bar.append(piece);
    list.append(mark, el("span", {}, part.replaceAll("_", " ")), el("span", {}, ms(value)));
  }
  return [bar, list];
}

function waitedBehind(name, told) {
  const sums = new Map();  // several prompts of one request count as one
  for (const one of told.behind) {
    const key = `${one.request} ${one.part}`, known = sums.get(key);
    if (known) known.ms += one.ms;
    else sums.set(key, {...one});
  }
  const each = [...sums.values()].slice(0, 5).map((one) => {
    let other = (one.request || "another").slice(0, 8);
    if (one.request === name) other = "its own other prompts";
    if (one.request === "another tenant") other = one.request;
    const took = one.ms === null ? "" : `, ${ms(one.ms)}`;
    return `${other} (${one.part.replaceAll("_", " ")}${took})`;
  });
  if (each.length) return `It waited for: ${each.join(", ")}.`;
  return told.unfinished ? "It waits for no other request." : "It waited for no other request.";
}

at("batch").addEventListener("click", (event) => {
  const cell = batch.cellUnder(event);
  const one = cell && batch.seen.requests.find((request) => request.id === cell[2]);
  if (one) choose(one.request, one.choice);
});
at("batch").addEventListener("mousemove", (event) => {
  const cell = batch.cellUnder(event);
  let text = "";
  if (cell) text = cell[3] ? `request ${cell[2]}: ${cell[3]} tokens of its ${cell[4] ? "prompt" : "answer"}, step ${cell[5].number}` : `request ${cell[2]} waits`;
  at("batch").title = text;
});

// -- asking ------------------------------------------------------------------------------------
function drawEngine() {
  if (!batch.seen) return;
  batch.draw();
  drawBlocks(batch.seen);
}

function tell(seen) {
  batch.take(seen);
  drawEngine();
  drawRequests(seen);
  drawFigures(tilesOf(seen), othersOf(seen.figures));
  if (chosen) showTimeline(chosen);
  showSettings(seen.settings);
  let doing = seen.unfinished ? `${seen.unfinished} under way` : "idle";
  if (!seen.figures.block_size) doing = "the model is being loaded";
  at("state").textContent = [at("model").value, doing].filter(Boolean).join(" · ");
}

async function look() {
  if (!document.hidden && !paused && !busy) {
    busy = true;
    try {
      const reply = await fetch(`v1/live?since=${batch.since}`, {headers: headers(at("admin").value || at("key").value)});
      at("closed").hidden = reply.ok;
      if (reply.ok) {
        const seen = await reply.json();
        if (seen.replicas) await fleet.tell(seen);
        else tell(seen);
      } else {
        at("closed").textContent = `This view is for whoever has the admin key (below): ${await refusal(reply)}`;
        at("state").textContent = at("model").value;
      }
    } catch { at("state").textContent = "The server does not answer."; }
    busy = false;
  }
  setTimeout(look, at("closed").hidden ? EVERY : 3000);
}

// -- settings ----------------------------------------------------------------------------------
// "key": whoever has the admin key may change them; "open KEY": this page may; else why not.
const settingsRule = document.querySelector("meta[name=settings]").content;
const pageKey = settingsRule.startsWith("open ") ? settingsRule.slice(5) : "";
let settled = "";

function lockSettings() {
  const asks = settingsRule === "key";
  at("admin-field").hidden = !asks;
  at("choices").disabled = !pageKey && !(asks && at("admin").value);
  at("locked").textContent = "";
  if (asks && !at("admin").value) at("locked").textContent = "Changing them needs the admin key of this server.";
  if (!asks && !pageKey) at("locked").textContent = settingsRule;
}

function showSettings(settings) {
  const told = JSON.stringify(settings);
  if (told === settled || at("choices").contains(document.activeElement)) return;
  settled = told;
  for (const name of ["policy", "order"]) {
    const known = [...at(name).options].some((one) => one.value === settings[name]);
    if (!known) at(name).append(el("option", {value: settings[name]}, settings[name]));
    at(name).value = settings[name];
  }
  at("budget").value = settings.max_num_batched_tokens;
  at("slots").value = settings.max_num_seqs;
}

async function listSettings() {
  try {
    const document = await (await fetch("openapi.json")).json();
    const fields = document.components.schemas.SettingsRequest.properties;
    for (const name of ["policy", "order"]) {
      at(name).replaceChildren(...fields[name].enum.map((value) => el("option", {value}, value)));
    }
    settled = "";
  } catch { /* the present ones are still there */ }
}

at("admin").addEventListener("input", lockSettings);
at("configure").addEventListener("submit", async (event) => {
  event.preventDefault();
  const wanted = {policy: at("policy").value, order: at("order").value, max_num_batched_tokens: Number(at("budget").value), max_num_seqs: Number(at("slots").value)};
  const sent = {method: "POST", headers: headers(pageKey || at("admin").value), body: JSON.stringify(wanted)};
  const reply = await fetch("v1/admin/config", sent);
  at("configured").textContent = reply.ok ? "Applied: watch the batch." : await refusal(reply);
});

// -- a load to look at -------------------------------------------------------------------------
const TOPICS = ["the sea", "a lighthouse", "trains", "bread", "the moon", "a river", "mountains", "a library", "winter", "bees", "old maps", "a garden"];
let demo = null;

function demoPrompt(i, turn, k) {
  const count = 5 + (i * 37 + turn * 23 + k * 51) % 160;
  const words = Array.from({length: count}, (_, j) => TOPICS[(i * 7 + j * 5 + k) % TOPICS.length]);
  return `Tell me about ${words.join(", ")}.`;
}

// A browser has six connections to one server: this takes three, with several prompts in each request.
async function makeLoad() {
  demo = new AbortController();
  at("demo").textContent = "Stop the load";
  const connection = async (k) => {
    for (let turn = 0; turn < 6 && !demo.signal.aborted; turn++) {
      await new Promise((go) => setTimeout(go, 300 * k));
      const prompt = Array.from({length: 2 + (turn + k) % 4}, (_, i) => demoPrompt(i, turn, k));
      const body = {model: at("model").value || undefined, prompt, max_tokens: 16 + (turn * 29 + k * 17) % 80, priority: 1};
      const sent = {method: "POST", headers: headers(at("key").value), body: JSON.stringify(body), signal: demo.signal};
      await (await fetch("v1/completions", sent)).text();
    }
  };
  await Promise.allSettled([0, 1, 2].map(connection));
  demo = null;
  at("demo").textContent = "Start a demo load";
}
at("demo").addEventListener("click", () => {
  if (demo) demo.abort();
  else makeLoad();
});
at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  at("pause").textContent = paused ? "Go on" : "Pause";
});
