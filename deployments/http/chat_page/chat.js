// The conversation on the screen: its turns, and the answer that is being written.

let busy = null;             // the AbortController of the answer being written
let contextSize = 0;

function turns() { return conversations.current.turns }

function show(turn) {
  const node = turn.role === "user" ? userNode(turn) : turn.role === "tool" ? toolNode(turn) : assistantNode(turn);
  turn.node = node;
  $("log").append(node);
  $("empty").hidden = true;
}

function addTurn(turn) {
  turns().push(turn);
  show(turn);
  $("scroller").scrollTop = $("scroller").scrollHeight;
  return turn;
}

function dropTurns(from) {
  for (const turn of turns().splice(from)) turn.node.remove();
  conversations.save();
}

function userNode(turn) {
  const row = element("div", "user-row"), node = element("div", "turn user"), edit = element("button", "edit", "Edit");
  node.append(element("span", "text", turn.content));
  edit.type = "button";
  edit.onclick = () => { if (!busy) editTurn(row, turn) };
  row.append(node, edit);
  return row;
}

function editTurn(row, turn) {
  const field = element("textarea"), buttons = element("div", "row"), cancel = element("button", "", "Cancel"), resend = element("button", "primary", "Send again");
  const end = () => { const again = userNode(turn); row.replaceWith(again); turn.node = again };
  field.value = turn.content;
  field.setAttribute("aria-label", "Edited message");
  cancel.type = resend.type = "button";
  cancel.onclick = end;
  resend.onclick = () => {
    if (busy || !field.value.trim()) return;
    dropTurns(turns().indexOf(turn));
    send(field.value);
  };
  field.onkeydown = event => {
    if (event.key === "Escape") end();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); resend.onclick() }
  };
  buttons.append(cancel, resend);
  row.replaceChildren(field, buttons);
  field.focus();
}

function toolNode(turn) {
  const node = element("details", "turn tool");
  node.append(element("summary", "", "Result of the tool"), element("div", "body", pretty(turn.content)));
  return node;
}

function assistantNode(turn) {
  const node = element("div", "turn assistant");
  node.append(element("div", "thought"), element("div", "text"), element("div", "calls"), element("div", "meta"));
  draw(turn, node);
  return node;
}

function draw(turn, node = turn.node) {
  const [thought, text, calls] = node.children;
  if (turn.reasoning) {
    if (!thought.firstChild) {
      const details = element("details");
      details.append(element("summary", "", "Reasoning"), element("div", "body"));
      thought.append(details);
    }
    thought.querySelector(".body").textContent = turn.reasoning;
  }
  text.replaceChildren($("probabilities").checked && turn.tokens?.length ? tokenSpans(turn.tokens) : markdown(turn.content ?? ""));
  const open = [...calls.querySelectorAll("textarea")].map(field => field.value);
  calls.replaceChildren(...(turn.calls ?? []).map((call, index) => callNode(turn, call, open[index] ?? "")));
}

function callNode(turn, call, value) {
  const node = element("details");
  node.open = true;
  node.append(element("summary", "", `Calls ${call.function.name}`), codeBlock(pretty(call.function.arguments), "json"));
  const isLast = turns().at(-1) === turn || turns().slice(turns().indexOf(turn) + 1).every(each => each.role === "tool");
  const isAnswered = turns().some(each => each.tool_call_id === call.id);
  if (isLast && !isAnswered) {
    const field = element("textarea"), button = element("button", "", "Send the result");
    field.value = value;
    field.setAttribute("aria-label", `Result of ${call.function.name}`);
    field.placeholder = "The result";
    button.type = "button";
    button.onclick = () => {
      if (busy) return;
      addTurn({ role: "tool", tool_call_id: call.id, content: field.value });
      draw(turn);
      if (turn.calls.every(each => turns().some(result => result.tool_call_id === each.id))) answer();
    };
    node.append(field, button);
  }
  return node;
}

async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection was lost before the answer was complete.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;   // ": ping"
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

function requestBody() {
  const system = $("system").value.trim(), limit = parseInt($("max_tokens").value, 10), seed = parseInt($("seed").value, 10);
  const messages = turns().slice(0, -1).map(({ role, content, calls, tool_call_id }) =>
    ({ role, content, ...(calls && { tool_calls: calls }), ...(tool_call_id && { tool_call_id }) }));
  if (system) messages.unshift({ role: "system", content: system });
  const body = { messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const tools = $("tools").value.trim();
  for (const input of moved()) body[input.id] = Number(input.value);
  if (!$("models").hidden) body.model = $("models").value;
  if (limit > 0) body.max_tokens = limit;
  if (!Number.isNaN(seed)) body.seed = seed;
  if ($("probabilities").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (tools) {
    try { body.tools = JSON.parse(tools) } catch { throw new Error("The tools in the settings are not valid JSON.") }
  }
  return body;
}

/** Adds what a chunk brings to the turn. */
function take(turn, choice) {
  const { content, reasoning_content, tool_calls } = choice.delta;
  if (content) turn.content += content;
  if (reasoning_content) turn.reasoning = (turn.reasoning ?? "") + reasoning_content;
  for (const part of tool_calls ?? []) {
    const call = ((turn.calls ??= [])[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
  if (choice.logprobs?.content) (turn.tokens ??= []).push(...choice.logprobs.content);
}

async function answer() {
  const turn = addTurn({ role: "assistant", content: "" }), node = turn.node, meta = node.querySelector(".meta");
  node.classList.add("busy");
  setBusy(new AbortController());
  let began = 0, latest = 0, tokens = 0, total = 0, frame = 0, reason = null, failure = null;
  const showProgress = () => {   // at most once a frame: a long answer takes longer to draw than a token to compute
    const atEnd = $("scroller").scrollHeight - $("scroller").scrollTop - $("scroller").clientHeight < 60;
    cancelAnimationFrame(frame);
    frame = 0;
    draw(turn);
    const seconds = (latest - began) / 1000;   // too short where all chunks were read at once
    if (tokens > 1) meta.textContent = `${tokens} tokens` + (seconds > 0.02 ? ` · ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "");
    if (total) showContext(total);
    if (atEnd) $("scroller").scrollTop = $("scroller").scrollHeight;
  };
  try {
    const response = await fetch(new URL("v1/chat/completions", base), { method: "POST", signal: busy.signal,
      headers: { "Content-Type": "application/json" }, body: JSON.stringify(requestBody()) });
    if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `The server answered ${response.status}.`);
    for await (const chunk of chunks(response)) {
      const choice = chunk.choices[0];
      began ||= performance.now();
      if (!choice) continue;
      take(turn, choice);
      reason = choice.finish_reason ?? reason;
      if (chunk.usage) { tokens = chunk.usage.completion_tokens; total = chunk.usage.total_tokens; latest = performance.now() }
      frame ||= requestAnimationFrame(showProgress);
    }
  } catch (error) {
    failure = error;
  }
  showProgress();
  node.classList.remove("busy");
  const note = words => { meta.textContent = [meta.textContent, words].filter(Boolean).join(" · ") };
  if (failure?.name === "AbortError") note("stopped");
  else if (failure) { meta.append(element("span", "error", failure.message)); meta.setAttribute("role", "alert") }
  else if (reason === "length") note("cut off at the token limit");
  setBusy(null);
  addAgain(turn, failure && !turn.content ? "Try again" : "Regenerate");
  conversations.save();
  showConversations();
  $("scroller").scrollTop = $("scroller").scrollHeight;
}

function addAgain(turn, words) {
  for (const button of document.querySelectorAll(".again")) button.remove();
  const again = element("button", "again", words);
  again.onclick = () => { if (!busy) { dropTurns(turns().indexOf(turn)); answer() } };
  turn.node.querySelector(".meta").append(again);
}

function setBusy(controller) {
  busy = controller;
  $("stop").hidden = !busy;
  $("send").hidden = !!busy;
  if (!busy) $("input").focus({ preventScroll: true });
}

function showContext(tokens) {
  $("context").value = contextSize ? tokens / contextSize : 0;
  $("used").textContent = contextSize ? `${tokens} / ${contextSize} tokens` : "";
}

function send(text) {
  if (busy || !text.trim()) return;
  const last = turns().at(-1);
  // Drop a message that was never answered, because roles alternate.
  if (last?.role === "assistant" && !last.content && !last.calls) dropTurns(turns().length - 2);
  $("input").value = "";
  addTurn({ role: "user", content: text.trim() });
  answer();
}
