// The page itself: its theme, its views on a small screen, and its beginning.
function theme(name) {
  document.documentElement.dataset.theme = name;
  colours.clear();
  drawEngine();
}

function keptTheme() {
  try { return localStorage.getItem("theme"); }
  catch { return null; }
}

function showView(name) {
  document.body.dataset.view = name;
  for (const each of at("views").children) {
    if (each.dataset.view === name) each.setAttribute("aria-current", "true");
    else each.removeAttribute("aria-current");
  }
  drawEngine();
  follow();
}

const darkSystem = matchMedia("(prefers-color-scheme: dark)");
theme(keptTheme() || (darkSystem.matches ? "dark" : "light"));
darkSystem.addEventListener("change", () => {
  if (!keptTheme()) theme(darkSystem.matches ? "dark" : "light");
});
at("theme").addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  theme(name);
  try { localStorage.setItem("theme", name); } catch { /* it holds until the page is closed */ }
});
at("views").addEventListener("click", (event) => {
  if (event.target.dataset.view) showView(event.target.dataset.view);
});
addEventListener("resize", drawEngine);
addEventListener("storage", () => { readConversations(); drawList(); });

readConversations();
openConversation(newestFirst()[0] || conversation);
lockSettings();
listSettings();
listModels();
look();
