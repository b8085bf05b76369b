// What all parts of the page share: nodes by id, requests to the server, numbers as text.
const at = (id) => document.getElementById(id);

function button(text, action, properties) {
  const made = el("button", {type: "button", ...properties}, text);
  made.addEventListener("click", action);
  return made;
}

function headers(key) {
  const sent = {"content-type": "application/json"};
  if (key) sent.authorization = "Bearer " + key;
  return sent;
}

async function refusal(reply) {
  try { return (await reply.json()).error?.message || `status ${reply.status}`; }
  catch { return `status ${reply.status}`; }
}

// The JSON of each server-sent event.
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

function ms(value) {
  if (value === null) return "–";
  return value < 1000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}

function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 && share > 0 ? 1 : 0)} %`;
}

function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

// Median and 99th percentile in one unit: "12 / 40 ms".
function spread(values) {
  if (!values.length) return "–";
  const ends = [quantile(values, 0.5), quantile(values, 0.99)];
  if (ends[1] < 999.5) return `${Math.round(ends[0])} / ${Math.round(ends[1])} ms`;
  const [median, most] = ends.map((end) => (end / 1000).toFixed(end < 9950 ? 1 : 0));
  return `${median} / ${most} s`;
}

// Words of the field, explained on hover and on focus.
const WORDS = {
  "step": "One forward pass of the model for all requests in the batch.",
  "prefill": "Prefill: the prompt is read, many tokens in a step.",
  "decode": "Decode: the answer is written, one token a step.",
  "KV memory": "Keys and values of the tokens computed so far, in blocks of a fixed number of tokens. A request that runs out of it waits.",
  "policy": "How a step is divided among prompts and answers. chunked (the default) reads prompts in pieces beside the running answers.",
  "order": "Which waiting request goes first. fcfs: first come, first served.",
  "budget": "The most tokens that one step computes: more makes prompts faster and pauses between tokens longer.",
  "Tokens/s": "Output tokens a second, over the steps drawn below.",
  "Running / waiting": "Requests in the batch, and those that wait for a place in it.",
  "TTFT p50 / p99": "Time to first token, median and 99th percentile of the last minute.",
  "ITL p50 / p99": "Inter-token latency: the time between two tokens of an answer, median and 99th percentile of the steps below.",
  "KV in use": "Share of the KV memory that running requests hold.",
  "Prefix hits": "Share of prompt tokens that were found in the prefix cache and not computed again.",
  "Replicas": "Servers behind this router: those that take requests, of all.",
  "Streams moved": "Answers that went on at another replica when theirs was lost or drained.",
};

function explained(node, word) {
  node.dataset.word = word;
  node.tabIndex = 0;
  return node;
}

function showTip(event) {
  const node = event.target.closest?.("[data-word]"), tip = at("tip");
  tip.hidden = !node || event.type === "focusout";
  if (tip.hidden) return;
  tip.textContent = WORDS[node.dataset.word];
  node.setAttribute("aria-describedby", "tip");
  const box = node.getBoundingClientRect();
  const left = Math.min(box.left, innerWidth - tip.offsetWidth - 8);
  const under = box.bottom + 6, fits = under + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${fits ? under : box.top - tip.offsetHeight - 6}px`;
}

for (const node of document.querySelectorAll("[data-word]")) node.tabIndex = 0;
for (const kind of ["mouseover", "focusin", "focusout"]) document.addEventListener(kind, showTip);

// One line below the conversation, with a button where something can be done about it.
function notice(text, label, action) {
  const parts = text ? [text] : [];
  if (label) parts.push(" ", button(label, () => { notice(""); action(); }, {className: "quiet"}));
  at("notice").replaceChildren(...parts);
}
