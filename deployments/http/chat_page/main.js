// Settings, conversations, keys and the state of the server.

const root = document.documentElement;
const fields = ["system", "temperature", "top_p", "repetition_penalty", "max_tokens", "seed", "tools"];

const sliders = [...document.querySelectorAll("dialog input[type=range]")];
let models = [], props = {};   // as the server describes them

/** The sliders that the user has moved. The server decides about the others. */
function moved() { return sliders.filter(input => "moved" in input.dataset) }
function showValues() {
  const { id, parent } = chosen() ?? {}, defaults = [id, parent].includes(props.model) ? props.sampling_defaults : {};
  for (const input of sliders) {
    const isMoved = "moved" in input.dataset, known = defaults?.[input.id];
    if (!isMoved) input.value = known ?? input.defaultValue;
    input.labels[0].querySelector(".value").textContent = isMoved ? input.value : known ?? "the model's";
  }
}
for (const name of fields) {
  const input = $(name), saved = store.get(name);
  if (saved !== null) { input.value = saved; input.dataset.moved = "" }
  input.addEventListener("input", () => { store.set(name, input.value); input.dataset.moved = ""; showValues() });
}
$("probabilities").checked = store.get("probabilities") === "1";
$("probabilities").onchange = () => {
  store.set("probabilities", $("probabilities").checked ? "1" : "0");
  for (const turn of turns()) if (turn.role === "assistant") draw(turn);
};
showValues();
$("reset").onclick = () => {
  for (const name of fields) { $(name).value = $(name).defaultValue; delete $(name).dataset.moved; store.drop(name) }
  showValues();
};
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

function chosen() { return models.find(each => each.id === $("models").value) ?? models[0] }
function showModels() {
  const select = $("models"), wanted = select.value || store.get("model");
  select.replaceChildren(...models.map(each => new Option(each.id)));
  if (models.some(each => each.id === wanted)) select.value = wanted;
  select.hidden = models.length < 2;
  $("model").hidden = !select.hidden;
  showChosen();
}
function showChosen() {
  contextSize = chosen().max_model_len;
  $("model").textContent = chosen().id;
  $("max_tokens").max = contextSize;
  showValues();
}
$("models").onchange = () => { store.set("model", $("models").value); showChosen(); showContext(0) };

// While the server loads, show its state and poll.
async function connect() {
  try {
    const answers = await Promise.all(["ready", "v1/models", "props"].map(path => fetch(new URL(path, base))));
    const [state, list, described] = await Promise.all(answers.map(each => each.json()));
    models = list.data;
    props = described;
    showModels();
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
