// What the engine does: polled while the page is seen, drawn from the last steps.
const COLUMNS = 90, ROWS = 18, EVERY = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1000 : 400;
const TENANTS = ["#4c7fa8", "#b0733a", "#5c8f5a", "#8b6aa8", "#a85c6a", "#7a7a4a", "#4a8f8f", "#8a6f5a"];
const steps = [], rows = new Map(), tenants = new Map(), cellsDrawn = [];
let since = 0, epoch = 0, paused = false, seen = null, busy = false, chosen = "";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const tenantColour = (name) => { if (!tenants.has(name)) tenants.set(name, TENANTS[tenants.size % TENANTS.length]); return tenants.get(name); };
const quantile = (values, share) => values.length ? [...values].sort((a, b) => a - b)[Math.min(values.length - 1, Math.floor(share * values.length))] : null;
const ms = (value) => value === null ? "–" : value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
const both = (values) => { if (!values.length) return "–"; const [a, b] = [quantile(values, 0.5), quantile(values, 0.99)]; return b !== null && b < 1000 ? `${Math.round(a)} / ${ms(b)}` : `${ms(a)} / ${ms(b)}`; };
const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;

function canvasOf(id, height) {
  const canvas = at(id), scale = devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale);
    canvas.style.height = height + "px";
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0); pen.clearRect(0, 0, width, height);
  return [pen, width];
}

function take(told) {
  if (told.epoch !== epoch) { epoch = told.epoch; since = 0; steps.length = 0; rows.clear(); }
  for (const step of told.steps) {
    const known = steps.findIndex((one) => one.number === step.number);
    if (known >= 0) steps[known] = step; else steps.push(step);
  }
  steps.splice(0, Math.max(0, steps.length - COLUMNS));
  const ended = steps.filter((step) => step.ended_s);  // one that runs is asked for again
  if (ended.length) since = Math.max(since, ended[ended.length - 1].number);
  seen = told;
}

function place() {  // a row for each sequence that is seen, given back when it is long gone
  const present = new Set(seen.requests.map((one) => one.id));
  for (const step of steps) for (const [id] of step.rows) present.add(id);
  for (const id of rows.keys()) if (!present.has(id)) rows.delete(id);
  const taken = new Set(rows.values());
  for (const id of present) {
    if (rows.has(id)) continue;
    let row = 0;
    while (taken.has(row)) row++;
    taken.add(row); rows.set(id, row);
  }
}

function drawBatch() {
  place();
  const height = 10 * Math.max(ROWS, Math.min(64, Math.max(0, ...rows.values()) + 1)), [pen, width] = canvasOf("batch", height);
  const wide = width / COLUMNS, first = COLUMNS - steps.length;
  const fills = [colour("decode"), colour("prefill")], most = Math.max(1, ...steps.flatMap((step) => step.rows.map((row) => row[1])));
  cellsDrawn.length = 0;
  if (!steps.length) { pen.fillStyle = colour("soft"); pen.font = "14px system-ui, sans-serif"; pen.textAlign = "center"; pen.fillText("No step yet.", width / 2, height / 2 + 5); }
  steps.forEach((step, i) => {
    const x = (first + i) * wide, there = new Set();
    for (const [id, n, prompt] of step.rows) {
      const y = 10 * rows.get(id);
      there.add(id);
      if (y >= height) continue;
      pen.globalAlpha = prompt ? 0.35 + 0.65 * Math.log(n + 1) / Math.log(most + 1) : 1;
      pen.fillStyle = fills[prompt];
      pen.fillRect(x, y + 1, Math.max(1, wide - 1), 8);
      cellsDrawn.push([x, y, id, n, prompt, step]);
    }
    if (i === steps.length - 1) for (const one of seen.requests) if (!there.has(one.id) && rows.has(one.id)) {
      pen.globalAlpha = 1; pen.fillStyle = colour("wait");
      pen.fillRect(x, 10 * rows.get(one.id) + 3, Math.max(1, wide - 1), 4);
      cellsDrawn.push([x, 10 * rows.get(one.id), one.id, 0, 0, step]);
    }
  });
  pen.globalAlpha = 1;
  const last = steps[steps.length - 1];
  at("batch").setAttribute("aria-label", last ? `The batch: the last step has ${last.rows.length} sequences, ${last.rows.filter((row) => row[2]).length} of them at their prompt` : "The batch: no step yet");
}

function drawBlocks() {
  const figures = seen.figures, total = figures.blocks_total || 0, size = figures.block_size || 1;
  const [pen, width] = canvasOf("blocks", 64), across = Math.max(10, Math.floor(width / 9)), count = across * 7;
  if (!total) { at("blocks-text").textContent = "Nothing was computed yet."; return; }
  const used = figures.blocks_used || 0, shared = figures.blocks_shared || 0, cached = figures.blocks_cached || 0, pinned = Math.min(cached + used, figures.pinned || 0);
  const held = new Map();
  for (const one of seen.requests) if (one.state !== "held") held.set(one.tenant, (held.get(one.tenant) || 0) + Math.ceil((one.prompt_tokens + one.output_tokens) / size));
  const sum = [...held.values()].reduce((a, b) => a + b, 0) || 1;
  const kinds = [];  // [cells, fill, drawn as an outline]
  // what is in use is never invisible, however much memory there is
  const cellsOf = (blocks) => blocks ? Math.max(1, Math.round(count * blocks / total)) : 0;
  for (const [name, blocks] of held) kinds.push([cellsOf(used * blocks / sum), tenantColour(name), false]);
  kinds.push([cellsOf(pinned), colour("good"), false], [cellsOf(Math.max(0, cached - pinned)), colour("wait"), false]);
  let cell = 0;
  const square = (fill, hollow) => {
    const x = (cell % across) * 9, y = Math.floor(cell / across) * 9;
    if (hollow) { pen.strokeStyle = fill; pen.strokeRect(x + 0.5, y + 0.5, 6, 6); } else { pen.fillStyle = fill; pen.fillRect(x, y, 7, 7); }
    cell++;
  };
  for (const [cells, fill] of kinds) for (let i = 0; i < cells && cell < count; i++) square(fill, false);
  while (cell < count) square(colour("line"), true);
  const text = `${used} of ${total} blocks in use` + (shared ? `, ${shared} shared` : "") + `, ${cached} cached` + (pinned ? `, ${pinned} pinned` : "") + `, ${total - used - cached} free`;
  at("blocks-text").textContent = text + "."; at("blocks").setAttribute("aria-label", "KV memory: " + text);
}

function figuresOf() {
  const now = seen.figures, found = [];
  const span = steps.length > 1 ? steps[steps.length - 1].begun_s - steps[0].begun_s : 0;
  const made = steps.slice(0, -1).reduce((sum, step) => sum + step.rows.filter((row) => !row[2]).length, 0);
  const fresh = steps.length && seen.now_s - steps[steps.length - 1].begun_s < 3;
  found.push(["Tokens a second", fresh && span ? (made / span).toFixed(0) : "0"]);
  found.push(["Running / waiting", `${now.running || 0} / ${now.waiting || 0}`]);
  const gaps = [];
  for (let i = 1; i < steps.length; i++) if (steps[i].ended_s && steps[i - 1].ended_s) {
    const there = new Set(steps[i - 1].rows.map((row) => row[0]));
    for (const [id, , prompt] of steps[i].rows) if (!prompt && there.has(id)) gaps.push(1000 * (steps[i].ended_s - steps[i - 1].ended_s));
  }
  found.push(["TTFT p50 / p99", both(seen.first_tokens_ms)]);
  found.push(["ITL p50 / p99", both(gaps)]);
  if (now.prompt_tokens) found.push(["Prefix cache hits", percent(now.cached_tokens / now.prompt_tokens)]);
  if (now.draft_tokens) found.push(["Drafts accepted", percent(now.accepted_tokens / now.draft_tokens)]);
  if (now.goodput_rate || now.goodput_share < 1) found.push(["Targets met (1 min)", percent(now.goodput_share)]);
  if (now.preemptions) found.push(["Preemptions", now.preemptions]);
  for (const [name, label] of [["kernels", "Time in kernels"], ["read", "Bandwidth used"], ["compute", "Arithmetic used"]])
    if (now["share_" + name] !== undefined) found.push([label, percent(now["share_" + name])]);
  return found;
}

function drawRequests() {
  const body = at("requests").tBodies[0], focused = document.activeElement?.dataset?.request;
  at("request-count").textContent = seen.unfinished ? `(${seen.unfinished})` : "";
  at("nobody").hidden = seen.unfinished > 0; at("requests").hidden = !seen.unfinished;
  body.replaceChildren(...seen.requests.slice(0, 24).map((one) => {
    const several = seen.requests.some((other) => other.request === one.request && other.id !== one.id);
    const button = el("button", {type: "button"}, one.request.slice(0, 8) + (several ? ` · ${one.choice + 1}` : ""));
    button.dataset.request = one.id;
    button.addEventListener("click", () => choose(one.request, one.choice));
    const cached = one.cached_tokens ? ` (${one.cached_tokens} cached)` : "";
    return el("tr", {}, el("td", {}, button, one.tenant ? ` ${one.tenant}` : ""), el("td", {}, one.state), el("td", {}, `${one.prompt_tokens}${cached}`), el("td", {}, String(one.output_tokens)), el("td", {}, `${one.age_s.toFixed(1)} s`));
  }));
  if (focused) body.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus();
}

function choose(name, choice = 0) {
  chosen = name; chosenChoice = choice;
  showTimeline(name, true);
}

const PART_COLOURS = {queue: "wait", waiting: "wait", prefill: "prefill", decode: "decode", delivery: "soft", accept: "soft", step_under_way: "soft", restart: "bad", preempted: "bad"};

let asking = false, chosenChoice = 0;
async function showTimeline(name, anew) {  // anew: it was clicked now; else it is under way, and looked at again
  if (asking && !anew) return;
  asking = true;
  try {
    const reply = await fetch(`v1/requests/${encodeURIComponent(name)}/timeline`, {headers: headers(at("key").value)});
    const body = reply.ok ? await reply.json() : null;
    if (name !== chosen) return;  // another one was clicked meanwhile
    if (body) { drawTimeline(name, body.choices.findLast((one) => one.index === chosenChoice) || body.choices[0], anew); return; }
    if (reply.status === 404 && !anew) return;  // it has just ended, and is told the next time
    chosen = "";
    at("request").replaceChildren(el("p", {className: "note error"}, await refused(reply)));
  } finally { asking = false; }
}

function drawTimeline(name, told, anew) {
  const under = told.unfinished, whole = under ? told.so_far_ms : told.e2e_ms;
  if (!under) chosen = "";
  const parts = Object.entries(told.parts_ms).filter(([, value]) => value > 0.05);
  const total = parts.reduce((sum, [, value]) => sum + value, 0), bar = el("div", {className: "bar", role: "img", ariaLabel: "Parts of its time"}), list = el("div", {className: "parts"});
  for (const [part, value] of parts.sort((a, b) => b[1] - a[1])) {
    const kind = Object.keys(PART_COLOURS).find((one) => part.includes(one)), fill = kind ? colour(PART_COLOURS[kind]) : tenantColour("part " + part);
    const piece = el("span", {title: `${part}: ${ms(value)}`}), mark = el("i");
    piece.style.flexBasis = `${100 * value / total}%`; piece.style.background = mark.style.background = fill;
    if (part.startsWith("others_")) piece.style.opacity = mark.style.opacity = 0.55;  // as what is its own, and paler
    bar.append(piece); list.append(mark, el("span", {}, part.replaceAll("_", " ")), el("span", {}, ms(value)));
  }
  const sums = new Map();  // several prompts of one request are one in its way
  for (const one of told.behind) {
    const key = `${one.request} ${one.part}`, known = sums.get(key);
    if (known) known.ms += one.ms; else sums.set(key, {...one});
  }
  const behind = [...sums.values()].slice(0, 5).map((one) => `${one.request === name ? "its own other prompts" : one.request === "another tenant" ? one.request : (one.request || "another").slice(0, 8)} (${one.part.replaceAll("_", " ")}${one.ms === null ? "" : ", " + ms(one.ms)})`);
  const first = told.ttft_ms === null ? (under ? "no token yet" : "no token") : `first token after ${ms(told.ttft_ms)}`;
  at("request").replaceChildren(el("h3", {}, `Where the time of ${name.slice(0, 8)} ${under ? "goes" : "went"}`), el("p", {className: "note"}, `${ms(whole)} ${under ? `so far, ${told.state}` : "in all"}, ${first}`), bar, list,
    el("p", {className: "note"}, behind.length ? `In its way: ${behind.join(", ")}` : under ? "Nobody is in its way." : "Nobody was in its way."));
  if (anew) at("request").scrollIntoView({block: "nearest"});
}

at("batch").addEventListener("click", (event) => {
  const cell = cellUnder(event), one = cell && seen.requests.find((one) => one.id === cell[2]);
  if (one) choose(one.request, one.choice);
});
at("batch").addEventListener("mousemove", (event) => {
  const cell = cellUnder(event);
  at("batch").title = !cell ? "" : cell[3] ? `request ${cell[2]}: ${cell[3]} tokens of its ${cell[4] ? "prompt" : "answer"}, step ${cell[5].number}` : `request ${cell[2]} waits`;
});
function cellUnder(event) {
  const wide = at("batch").clientWidth / COLUMNS;
  return cellsDrawn.find(([x, y]) => event.offsetX >= x && event.offsetX < x + wide && event.offsetY >= y && event.offsetY < y + 10);
}

async function look() {
  if (!document.hidden && !paused && !busy) {
    busy = true;
    try {
      const reply = await fetch(`v1/live?since=${since}`, {headers: headers(at("admin").value || at("key").value)});
      at("closed").hidden = reply.ok;
      if (reply.ok) {
        take(await reply.json());
        drawBatch(); drawBlocks(); drawRequests();
        at("figures").replaceChildren(...figuresOf().map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, String(value)))));
        if (chosen) showTimeline(chosen);
        showSettings(seen.settings);
        at("state").replaceChildren(el("span", {id: "model-name"}, `${at("model").value || "ready"} · `), seen.unfinished ? seen.unfinished + " under way" : "idle");
      } else {
        at("closed").textContent = `What the engine does is for whoever has the admin key (below): ${await refused(reply)}`;
        at("state").textContent = at("model").value;
      }
    } catch { at("state").textContent = "The server does not answer."; }
    busy = false;
  }
  setTimeout(look, at("closed").hidden ? EVERY : 3000);
}

// -- settings ---------------------------------------------------------------------------------------------
let settled = "";
function showSettings(settings) {
  const told = JSON.stringify(settings);
  if (told === settled || at("configure").contains(document.activeElement)) return;
  settled = told;
  for (const name of ["policy", "order"]) {
    if (![...at(name).options].some((one) => one.value === settings[name])) at(name).append(el("option", {value: settings[name]}, settings[name]));
    at(name).value = settings[name];
  }
  at("budget").value = settings.max_num_batched_tokens; at("slots").value = settings.max_num_seqs;
}
async function choices() {
  try {
    const fields = (await (await fetch("openapi.json")).json()).components.schemas.SettingsRequest.properties;
    for (const name of ["policy", "order"]) for (const value of fields[name].enum || []) at(name).append(el("option", {value}, value));
  } catch { /* the present ones are still there */ }
}
at("configure").addEventListener("submit", async (event) => {
  event.preventDefault();
  const wanted = {policy: at("policy").value, order: at("order").value, max_num_batched_tokens: Number(at("budget").value), max_num_seqs: Number(at("slots").value)};
  const reply = await fetch("v1/admin/config", {method: "POST", headers: headers(at("admin").value), body: JSON.stringify(wanted)});
  at("configured").textContent = reply.ok ? "Changed: watch the batch." : await refused(reply);
});

// -- a load to look at ------------------------------------------------------------------------------------
const TOPICS = ["the sea", "a lighthouse", "trains", "bread", "the moon", "a river", "mountains", "a library", "winter", "bees", "old maps", "a garden"];
let demo = null;
async function makeLoad() {  // a browser has six connections to one server: three of them, several prompts in each request
  demo = new AbortController(); at("demo").textContent = "Stop the load";
  const connection = async (k) => {
    for (let turn = 0; turn < 6 && !demo.signal.aborted; turn++) {
      await new Promise((go) => setTimeout(go, 300 * k));
      const prompt = Array.from({length: 2 + (turn + k) % 4}, (_, i) => "Tell me about " + Array.from({length: 5 + (i * 37 + turn * 23 + k * 51) % 160}, (_, j) => TOPICS[(i * 7 + j * 5 + k) % TOPICS.length]).join(", ") + ".");
      const body = {model: at("model").value || undefined, prompt, max_tokens: 16 + (turn * 29 + k * 17) % 80, priority: 1};
      await (await fetch("v1/completions", {method: "POST", headers: headers(at("key").value), body: JSON.stringify(body), signal: demo.signal})).text();
    }
  };
  await Promise.allSettled([0, 1, 2].map(connection));
  demo = null; at("demo").textContent = "Show me a load";
}
at("demo").addEventListener("click", () => { if (demo) demo.abort(); else makeLoad(); });

// -- the page itself --------------------------------------------------------------------------------------
function theme(name) { document.documentElement.dataset.theme = name; if (seen) { drawBatch(); drawBlocks(); } }
const kept = (() => { try { return localStorage.getItem("theme"); } catch { return null; } })();
const system = matchMedia("(prefers-color-scheme: dark)");
theme(kept || (system.matches ? "dark" : "light"));
system.addEventListener("change", () => { if (!kept) theme(system.matches ? "dark" : "light"); });
at("theme").addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  theme(name);
  try { localStorage.setItem("theme", name); } catch { /* it holds until the page is closed */ }
});
at("pause").addEventListener("click", () => { paused = !paused; at("pause").setAttribute("aria-pressed", String(paused)); at("pause").textContent = paused ? "Go on" : "Pause"; });
addEventListener("resize", () => { if (seen) { drawBatch(); drawBlocks(); } });
choices();
look();
