// Settings, conversations, keys and the state of the server.

const root = document.documentElement;
const fields = ["system", "temperature", "top_p", "repetition_penalty", "max_tokens", "seed", "tools"];

function showValues() {
  for (const input of document.querySelectorAll("dialog input[type=range]")) input.labels[0].querySelector(".value").textContent = input.value;
}
for (const name of fields) {
  const input = $(name), saved = store.get(name);
  if (saved !== null) input.value = saved;
  input.addEventListener("input", () => { store.set(name, input.value); showValues() });
}
$("probabilities").checked = store.get("probabilities") === "1";
$("probabilities").onchange = () => {
  store.set("probabilities", $("probabilities").checked ? "1" : "0");
  for (const turn of turns()) if (turn.role === "assistant") draw(turn);
};
showValues();
$("reset").onclick = () => { for (const name of fields) { $(name).value = $(name).defaultValue; store.set(name, $(name).value) } showValues() };
$("open-settings").onclick = () => $("settings").showModal();
$("open-status").onclick = () => statusView.open();
$("status-view").onclose = () => clearInterval(statusView.timer);
for (const dialog of document.querySelectorAll("dialog")) dialog.onclick = event => { if (event.target === dialog) dialog.close() };  // outside of it

if (store.get("theme")) root.dataset.theme = store.get("theme");
$("theme").onclick = () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  store.set("theme", root.dataset.theme = dark ? "light" : "dark");
};

function showConversations() {
  $("conversations").replaceChildren(...conversations.all.map(each => {
    const row = element("li", each === conversations.current ? "current" : ""), open = element("button", "open", each.title || "Untitled");
    const rename = element("button", "act", "✎"), remove = element("button", "act", "✕");
    open.onclick = () => { openConversation(each); toggleMenu(false) };
    rename.onclick = () => {
      const title = prompt("Title", each.title);
      if (title) { each.title = title.slice(0, 120); conversations.save(); showConversations() }
    };
    remove.onclick = () => {
      busy?.abort();
      conversations.remove(each);
      openConversation(conversations.current);
    };
    rename.ariaLabel = `Rename ${each.title}`;
    remove.ariaLabel = `Delete ${each.title}`;
    row.append(open, rename, remove);
    return row;
  }));
}
function openConversation(conversation) {
  busy?.abort();
  conversations.open(conversation);
  $("log").replaceChildren();
  $("empty").hidden = conversation.turns.length > 0;
  conversation.turns.forEach(show);
  const last = conversation.turns.at(-1);
  if (last?.role === "assistant") addAgain(last, "Regenerate");
  showContext(0);
  showConversations();
  $("scroller").scrollTop = $("scroller").scrollHeight;
}
function beginConversation() {
  busy?.abort();
  conversations.begin();
  openConversation(conversations.current);
  toggleMenu(false);
  $("input").focus();
}
function toggleMenu(open = !$("side").classList.contains("open")) {
  $("side").classList.toggle("open", open);
  $("menu").setAttribute("aria-expanded", String(open));
}
$("menu").onclick = () => toggleMenu();
$("scroller").onclick = () => toggleMenu(false);
$("new").onclick = $("clear").onclick = beginConversation;
$("export").onclick = () => {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([store.get("conversations") ?? "[]"], { type: "application/json" }));
  link.download = "conversations.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};
$("forget").onclick = () => {
  if (!conversations.all.length || !confirm("Delete all conversations from this browser?")) return;
  busy?.abort();
  for (const each of [...conversations.all]) conversations.remove(each);
  beginConversation();
};

$("composer").onsubmit = event => { event.preventDefault(); send($("input").value) };
$("input").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send($("input").value) }
};
$("stop").onclick = () => busy?.abort();
addEventListener("keydown", event => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") { busy?.abort(); toggleMenu(false) }
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); beginConversation() }
});
for (const button of document.querySelectorAll(".suggest button")) button.onclick = () => send(button.textContent);

// While the server loads, show its state and poll.
async function connect() {
  try {
    const [ready, models] = await Promise.all([fetch(new URL("ready", base)), fetch(new URL("v1/models", base))]);
    const model = (await models.json()).data[0], state = await ready.json();
    contextSize = model.max_model_len;
    $("model").textContent = model.id;
    $("max_tokens").max = contextSize;
    if (!$("used").textContent) showContext(0);
    $("status").textContent = state.ready ? "" : `${state.phase}… ${state.detail}`;
    if (!state.ready) setTimeout(connect, 2000);
  } catch {
    $("status").textContent = "The server does not answer.";
    setTimeout(connect, 2000);
  }
}
conversations.load();
if (conversations.current) openConversation(conversations.current); else beginConversation();
$("input").focus();
connect();
