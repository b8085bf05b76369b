// Markdown of a model's answer as nodes. Text is only ever text: nothing of an answer is read as HTML.
"use strict";

function el(name, properties, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties || {})) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const DEEPEST = 16;  // quotes and lists within others; what lies deeper is shown as it is
// Each has a most, so that no text takes long.
const INLINE = /(`{1,9})([^`]{1,2000})\1|\*\*(.{1,2000}?)\*\*|__(.{1,2000}?)__|\*([^*\s][^*]{0,2000})\*|\b_([^_]{1,2000})_\b|\[([^\]]{1,500})\]\(([^)\s]{1,2000})\)|(https?:\/\/[^\s<>()]+)/;

function inline(text) {
  const found = [];
  while (text) {
    const hit = INLINE.exec(text);
    if (!hit) break;
    const [whole, , code, bold, bolder, italic, slanted, label, address, bare] = hit;
    if (hit.index) found.push(text.slice(0, hit.index));
    if (code) found.push(el("code", {}, code));
    else if (bold || bolder) found.push(el("strong", {}, ...inline(bold || bolder)));
    else if (italic || slanted) found.push(el("em", {}, ...inline(italic || slanted)));
    else if (bare || /^(https?:|mailto:)/.test(address)) found.push(el("a", {href: bare || address, target: "_blank", rel: "noopener noreferrer"}, label || bare));
    else found.push(whole);
    text = text.slice(hit.index + whole.length);
  }
  if (text) found.push(text);
  return found;
}

function codeBlock(language, lines) {
  const code = el("code", {}, ...coloured(lines.join("\n"), language));
  const copy = el("button", {type: "button"}, "Copy");
  copy.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(code.textContent); copy.textContent = "Copied"; }
    catch { copy.textContent = "Not allowed"; }
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  const head = el("div", {className: "code-head"}, language, copy);
  return el("div", {className: "code"}, head, el("pre", {tabIndex: 0, ariaLabel: language ? `Code, ${language}` : "Code"}, code));
}

function listOf(lines, at, indent, depth) {
  const ordered = /^\s*\d+[.)]/.test(lines[at]);
  const list = el(ordered ? "ol" : "ul", ordered ? {start: parseInt(lines[at].trim(), 10) || 1} : {});
  let last = null;
  for (; at < lines.length; at++) {
    const item = /^(\s*)([-*+]|\d+[.)])\s+(.*)$/.exec(lines[at]);
    if (!item) {
      if (!lines[at].trim() || !/^\s/.test(lines[at]) || !last) break;
      last.append(" ", ...inline(lines[at].trim()));
    } else if (item[1].length > indent + 1 && last && depth < DEEPEST) {
      const [inner, next] = listOf(lines, at, item[1].length, depth + 1);
      last.append(inner); at = next - 1;
    } else if (item[1].length < indent) break;
    else { last = el("li", {}, ...inline(item[3])); list.append(last); }
  }
  return [list, at];
}

function cells(line) { return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim()); }

// The answer as nodes, whatever it is: where that fails, as its text.
function markdown(text) {
  try { return blocks(text, 0); } catch { return el("div", {className: "plain"}, text); }
}

function blocks(text, depth) {
  const lines = text.split("\n"), found = document.createDocumentFragment();
  for (let at = 0; at < lines.length;) {
    const line = lines[at], fence = /^\s{0,3}(`{3,}|~{3,})\s*(\S*)/.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (fence) {
      const begin = ++at;
      while (at < lines.length && !(lines[at].trim().startsWith(fence[1]) && /^[`~]+$/.test(lines[at].trim()))) at++;
      found.append(codeBlock(fence[2], lines.slice(begin, at++)));
    } else if (heading) { found.append(el("h3", {}, ...inline(heading[2]))); at++; }
    else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) { found.append(el("hr")); at++; }
    else if (/^\s*([-*+]|\d+[.)])\s+/.test(line)) {
      const [list, next] = listOf(lines, at, /^\s*/.exec(line)[0].length, depth);
      found.append(list); at = next;
    } else if (/^\s*>/.test(line)) {
      const quoted = [];
      while (at < lines.length && /^\s*>/.test(lines[at])) quoted.push(lines[at++].replace(/^\s*>\s?/, ""));
      const quote = el("blockquote"); quote.append(depth < DEEPEST ? blocks(quoted.join("\n"), depth + 1) : quoted.join("\n")); found.append(quote);
    } else if (line.includes("|") && /^[\s|:-]+$/.test(lines[at + 1] || "") && (lines[at + 1] || "").includes("-")) {
      const table = el("table"), head = el("tr", {}, ...cells(line).map((cell) => el("th", {}, ...inline(cell))));
      table.append(head);
      for (at += 2; at < lines.length && lines[at].includes("|"); at++) table.append(el("tr", {}, ...cells(lines[at]).map((cell) => el("td", {}, ...inline(cell)))));
      found.append(table);
    } else if (!line.trim()) at++;
    else {
      const words = [];
      do words.push(...(words.length ? [el("br")] : []), ...inline(lines[at++]));
      while (at < lines.length && lines[at].trim() && !/^\s*([-*+>]\s|\d+[.)]\s|#{1,6}\s|`{3}|~{3})/.test(lines[at]));
      found.append(el("p", {}, ...words));
    }
  }
  return found;
}
