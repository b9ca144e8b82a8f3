// The tokens of an answer, coloured by probability. Their alternatives are shown while a pointer or the focus is on one.

function tokenSpans(tokens) {
  const target = element("div", "tokens");
  let bytes = [];           // of a character that several tokens make
  for (const token of tokens) {
    bytes.push(...token.bytes);
    let text;
    try { text = new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes)) } catch { continue }
    bytes = [];
    const probability = Math.exp(token.logprob);
    const node = element("span", "token p" + [0.1, 0.3, 0.6, 0.9].filter(bound => probability >= bound).length, text);
    node.tabIndex = 0;
    node.setAttribute("aria-label", `${token.token}, ${percent(probability)}`);
    node.onmouseenter = node.onfocus = () => showAlternatives(node, token);
    node.onmouseleave = node.onblur = () => $("alternatives").hidePopover();
    target.append(node);
  }
  return target;
}

function percent(probability) {
  return probability >= 0.9995 ? "100 %" : probability < 0.001 ? "< 0.1 %" : (100 * probability).toFixed(1) + " %";
}

function showAlternatives(node, token) {
  const box = $("alternatives"), rows = element("table");
  const others = token.top_logprobs.some(each => each.token === token.token) ? token.top_logprobs : [token, ...token.top_logprobs];
  for (const each of others) {
    const row = element("tr"), text = element("td");
    text.append(element(each.token === token.token ? "strong" : "span"));
    text.firstChild.append(element("code", "", each.token.replaceAll("\n", "⏎") || "∅"));
    row.append(text, element("td", "", percent(Math.exp(each.logprob))));
    rows.append(row);
  }
  box.replaceChildren(rows);
  box.showPopover();
  const at = node.getBoundingClientRect(), size = box.getBoundingClientRect();
  box.style.left = Math.max(4, Math.min(at.left, innerWidth - size.width - 4)) + "px";
  box.style.top = (at.top > size.height + 8 ? at.top - size.height - 6 : at.bottom + 6) + "px";
}
