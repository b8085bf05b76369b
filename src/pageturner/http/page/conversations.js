// Conversations that survive a reload: kept in this browser, listed, renamed, deleted, exported.
//
// A conversation is {id, title, system, changed, turns}; a turn {text, answers, chosen, note}; an
// answer {text, thoughts, calls, finish}. Each conversation has an entry of its own in the store.
const PLACE = "pageturner/conversation/";
const TITLE = 48;  // characters of a title that is made of the first message
const conversations = new Map();
let conversation = emptyConversation();

function emptyConversation() {
  const id = Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  return {id, title: "", system: "", changed: 0, turns: []};
}

function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  if (line.length <= TITLE) return line;
  return line.slice(0, TITLE).replace(/\s+\S*$/, "") + " …";
}

function readConversations() {
  try {
    for (const key of Object.keys(localStorage)) {
      if (!key.startsWith(PLACE)) continue;
      const read = JSON.parse(localStorage.getItem(key));
      if (!Array.isArray(read?.turns)) continue;
      const known = conversations.get(read.id);  // newer where another tab went on with it
      if (known === conversation || known?.changed >= read.changed) continue;
      conversations.set(read.id, read);
    }
  } catch { notice("Earlier conversations cannot be read in this browser."); }
}

function keep(one, changed = true) {
  if (!one.turns.length) return;
  one.title ||= titleOf(one.turns[0].text);
  if (changed) one.changed = Date.now();
  conversations.set(one.id, one);
  try { localStorage.setItem(PLACE + one.id, JSON.stringify(one)); }
  catch { notice("This browser has no room for more: export or delete conversations."); }
  drawList();
}

function newestFirst() {
  return [...conversations.values()].sort((a, b) => b.changed - a.changed);
}

function drawList() {
  if (at("conversations").querySelector("input")) return;  // one is being renamed
  const focused = document.activeElement?.dataset?.of;
  const items = newestFirst().map((one) => {
    const here = one.id === conversation.id;
    const name = button(one.title, () => openConversation(one), {className: "name", title: one.title});
    name.dataset.of = one.id;
    if (here) name.setAttribute("aria-current", "true");
    const item = el("li", {}, name);
    if (here) item.append(actionsOf(one, item));
    return item;
  });
  at("conversations").replaceChildren(...items);
  if (focused) at("conversations").querySelector(`[data-of="${focused}"]`)?.focus();
  at("title").textContent = conversation.title || "New conversation";
}

function actionsOf(one, item) {
  return el("div", {className: "actions"},
    button("Rename", () => rename(one, item)),
    button("Markdown", () => download(one, "md", asMarkdown(one)), {title: "Export as Markdown"}),
    button("JSON", () => download(one, "json", asJSON(one)), {title: "Export as JSON"}),
    button("Delete", () => remove(one)));
}

function rename(one, item) {
  const field = el("input", {value: one.title, ariaLabel: "Title"});
  const done = (title) => {
    field.remove();
    if (title) { one.title = title; keep(one, false); } else drawList();
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") done(field.value.trim());
    if (event.key === "Escape") done("");
  });
  field.addEventListener("blur", () => { if (field.isConnected) done(field.value.trim()); });
  item.replaceChildren(field);
  field.focus();
  field.select();
}

function remove(one) {
  conversations.delete(one.id);
  localStorage.removeItem(PLACE + one.id);
  if (one.id === conversation.id) openConversation(emptyConversation());
  drawList();
  notice(`“${one.title}” is deleted.`, "Undo", () => { keep(one, false); openConversation(one); });
}

function asMarkdown(one) {
  const parts = [`# ${one.title}`];
  if (one.system) parts.push(`> ${one.system.replaceAll("\n", "\n> ")}`);
  for (const turn of one.turns) {
    parts.push(`## You\n\n${turn.text}`);
    turn.answers.forEach((answer, i) => {
      const which = turn.answers.length > 1 ? ` (${i + 1} of ${turn.answers.length})` : "";
      parts.push(`## Answer${which}\n\n${answer.text}`);
    });
  }
  return parts.join("\n\n") + "\n";
}

// The messages as the API takes them, with the answer that each turn goes on from.
function messagesOf(one, turns = one.turns) {
  const messages = one.system ? [{role: "system", content: one.system}] : [];
  for (const turn of turns) {
    messages.push({role: "user", content: turn.text});
    const answer = turn.answers[turn.chosen];
    if (answer?.text) messages.push({role: "assistant", content: answer.text});
  }
  return messages;
}

function asJSON(one) {
  const answers = one.turns.map((turn) => turn.answers.map((answer) => answer.text));
  return JSON.stringify({title: one.title, messages: messagesOf(one), answers}, null, 2) + "\n";
}

function download(one, ending, text) {
  const name = one.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation";
  const address = URL.createObjectURL(new Blob([text], {type: "text/plain"}));
  el("a", {href: address, download: `${name}.${ending}`}).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
