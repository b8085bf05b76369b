// Colours of code: comments, strings, numbers and keywords, by rules that many languages share.
const HASH = new Set("python py sh bash shell zsh console yaml yml toml ruby rb r make makefile dockerfile perl nix ini".split(" "));
const DASHES = new Set("sql lua haskell hs elm ada".split(" "));
const MARKUP = new Set("html xml svg vue".split(" "));
const KEYWORDS = new Set((
  "abstract and as assert async await begin bool break case catch char class const continue def "
  + "default del delete do double elif else end enum except export extends extern false final "
  + "finally float fn for foreach from func function global go goto if impl implements import in "
  + "instanceof int interface is lambda let local long loop match mod mut namespace new nil none "
  + "not null or package pass private protected pub public raise return select self static string "
  + "struct super switch template then this throw trait true try type typeof union unsafe use "
  + "using var void where while with yield insert update into values join group order by create "
  + "table echo fi done esac export").split(" "));
const LONGEST = 50000;  // characters of code that is coloured

function commentsOf(language) {
  if (HASH.has(language)) return "#[^\\n]*";
  if (DASHES.has(language)) return "--[^\\n]*";
  if (MARKUP.has(language)) return "<!--[^]*?(?:-->|$)";
  return "//[^\\n]*|/\\*[^]*?(?:\\*/|$)";
}

// Text and coloured nodes; of a language that is not named, only the text.
function coloured(code, named) {
  const language = named.toLowerCase();
  if (!language || language === "text" || code.length > LONGEST) return [code];
  const strings = '"""[^]*?(?:"""|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|\'(?:[^\'\\\\\\n]|\\\\.)*\'?|`[^`]*`?';
  const pattern = new RegExp(
    `(${commentsOf(language)})|(${strings})|(\\b\\d[\\w.]*)|([A-Za-z_][\\w]*)`, "g");
  const found = [];
  let behind = 0;
  for (const hit of code.matchAll(pattern)) {
    const [text, comment, string, number] = hit;
    let kind = KEYWORDS.has(text.toLowerCase()) ? "keyword" : "";
    if (comment) kind = "comment";
    else if (string) kind = "string";
    else if (number) kind = "number";
    if (!kind) continue;
    found.push(code.slice(behind, hit.index), el("span", {className: "c-" + kind}, text));
    behind = hit.index + text.length;
  }
  found.push(code.slice(behind));
  return found;
}
