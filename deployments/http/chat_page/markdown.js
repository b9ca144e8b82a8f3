// Markdown as nodes of the page. Text goes into the page through textContent only: nothing that a model writes becomes markup.
// Links are shown as text, because a page that a model writes to must not lead elsewhere.

const DEEPEST = 30;   // levels of quotes, lists and emphasis; browsers crash on thousands
const BLOCK = /^(?:```|#{1,6} |>|[-*+] |\d{1,9}[.)] |\|)/;

function markdown(text, depth = 0) {
  if (depth > DEEPEST) return document.createTextNode(text);
  const target = document.createDocumentFragment(), trimmed = text.trim();
  if (/^[[{]/.test(trimmed)) {
    try { target.append(codeBlock(JSON.stringify(JSON.parse(trimmed), null, 2), "json")); return target } catch { /* not JSON, or not all of it yet */ }
  }
  const lines = text.split("\n");
  for (let at = 0; at < lines.length;) {
    const line = lines[at], from = at;
    const fence = /^\s*(```+|~~~+)\s*([\w+#.-]*)/.exec(line);
    if (fence) {
      for (at++; at < lines.length && !lines[at].trim().startsWith(fence[1]);) at++;
      target.append(codeBlock(lines.slice(from + 1, at).join("\n"), fence[2]));
      at++;
    } else if (!line.trim()) {
      at++;
    } else if (/^#{1,6} /.test(line)) {
      const heading = element("h" + Math.min(4, Math.max(2, line.indexOf(" "))));
      inline(heading, line.replace(/^#+\s*/, ""));
      target.append(heading);
      at++;
    } else if (line.startsWith(">")) {
      while (at < lines.length && lines[at].startsWith(">")) at++;
      const quote = element("blockquote");
      quote.append(markdown(lines.slice(from, at).map(each => each.replace(/^> ?/, "")).join("\n"), depth + 1));
      target.append(quote);
    } else if (/^\s*(?:[-*+]|\d{1,9}[.)]) /.test(line)) {
      while (at < lines.length && /^(?:\s*(?:[-*+]|\d{1,9}[.)]) |\s{2,}\S)/.test(lines[at])) at++;
      target.append(list(lines.slice(from, at), depth + 1));
    } else if (line.startsWith("|") && /^\|?[\s:|-]+\|[\s:|-]*$/.test(lines[at + 1] ?? "")) {
      while (at < lines.length && lines[at].startsWith("|")) at++;
      target.append(table(lines.slice(from, at)));
    } else {
      for (at++; at < lines.length && lines[at].trim() && !BLOCK.test(lines[at]);) at++;
      const paragraph = element("p");
      lines.slice(from, at).forEach((each, index) => { if (index) paragraph.append(element("br")); inline(paragraph, each) });
      target.append(paragraph);
    }
  }
  return target;
}

function list(lines, depth) {
  if (depth > DEEPEST) return document.createTextNode(lines.join("\n"));
  const made = element(/^\s*\d/.test(lines[0]) ? "ol" : "ul"), indent = /^\s*/.exec(lines[0])[0].length;
  if (made.tagName === "OL") made.start = parseInt(lines[0], 10);
  for (let at = 0; at < lines.length;) {
    const item = element("li"), from = ++at;
    inline(item, lines[from - 1].replace(/^\s*(?:[-*+]|\d{1,9}[.)]) /, ""));
    while (at < lines.length && /^\s*/.exec(lines[at])[0].length > indent) at++;
    const inner = lines.slice(from, at);
    if (inner.length) item.append(/^\s*(?:[-*+]|\d{1,9}[.)]) /.test(inner[0]) ? list(inner, depth + 1) : markdown(inner.map(each => each.trim()).join("\n"), depth + 1));
    made.append(item);
  }
  return made;
}

function table(lines) {
  const made = element("table");
  lines.forEach((line, row) => {
    if (row === 1) return;
    const cells = element("tr");
    for (const cell of line.replace(/^\||\|\s*$/g, "").split("|")) {
      const node = element(row ? "td" : "th");
      inline(node, cell.trim());
      cells.append(node);
    }
    made.append(cells);
  });
  return made;
}

function inline(target, text, depth = 0) {
  const pattern = /(`+)(.+?)\1|(\*\*|__)(?=\S)(.+?)\3|(?<![\w*])([*_])(?=\S)(.+?)(?<=\S)\5(?![\w*])/g;
  let end = 0;
  for (const found of text.matchAll(pattern)) {
    target.append(text.slice(end, found.index));
    end = found.index + found[0].length;
    if (found[2] !== undefined) { target.append(element("code", "", found[2])); continue }
    const node = element(found[4] !== undefined ? "strong" : "em");
    if (depth < DEEPEST) inline(node, found[4] ?? found[6], depth + 1); else node.textContent = found[4] ?? found[6];
    target.append(node);
  }
  target.append(text.slice(end));
}

function codeBlock(text, language) {
  const block = element("div", "code"), top = element("div", "top"), copy = element("button", "", "Copy"), pre = element("pre");
  copy.type = "button";
  copy.onclick = async () => {
    try { await navigator.clipboard.writeText(text); copy.textContent = "Copied" } catch { copy.textContent = "Copying is not allowed here" }
    setTimeout(() => { copy.textContent = "Copy" }, 1500);
  };
  top.append(element("span", "", language), copy);
  pre.append(element("code", "", text));
  pre.tabIndex = 0;
  block.append(top, pre);
  return block;
}

/** The text of a call's arguments, indented where they are JSON. */
function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2) } catch { return text }
}
