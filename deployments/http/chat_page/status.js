// The status view: plots of the last two minutes from this replica's metrics, the ranks' shares, and the model's facts.

const KEPT = 120;       // samples of each plot
const statusView = {
  timer: null,
  samples: [],          // {at, metrics}

  async open() {
    $("status-view").showModal();
    clearInterval(this.timer);
    this.timer = setInterval(() => this.update(), 1000);
    await this.update();
  },
  close() { clearInterval(this.timer) },

  async update() {
    try {
      const [metrics, props] = await Promise.all([fetch(new URL("metrics", base)), fetch(new URL("props", base))]);
      if (!metrics.ok || !props.ok) return;
      this.samples.push({ at: performance.now() / 1000, metrics: parseMetrics(await metrics.text()) });
      if (this.samples.length > KEPT) this.samples.shift();
      this.show(await props.json());
    } catch { /* the next second tries again */ }
  },

  show(props) {
    const gauge = name => [{ label: "", values: this.samples.map(({ metrics }) => sum(metrics["llama_" + name])) }];
    const rate = (name, label = "") => ({ label, values: this.samples.map((sample, index) => this.rate(name, index)) });
    const ranks = Object.keys(this.samples.at(-1).metrics.llama_rank_step_seconds ?? {});
    const perRank = ranks.map(key => ({
      label: "rank " + (/rank="(\d+)"/.exec(key)?.[1] ?? ""),
      values: this.samples.map(({ metrics }) => 1000 * (metrics.llama_rank_step_seconds?.[key] ?? 0)),
    }));
    $("plots").replaceChildren(
      plot("Requests running", gauge("num_requests_running")),
      plot("Requests waiting", gauge("num_requests_waiting")),
      plot("Cache in use", gauge("kv_cache_usage_perc").map(each => ({ ...each, values: each.values.map(value => 100 * value) })), "%"),
      plot("Tokens a second", [rate("generation_tokens_total", "new"), rate("prompt_tokens_total", "prompt")]),
      plot("Step of a rank", perRank, "ms"),
      plot("Restarts of the ranks", gauge("rank_restarts_total")),
    );
    const { ranks: shares, sampling_defaults: sampling, ...facts } = props;
    rows("ranks", [["Rank", "Share", "Weights", "Type", "Device", "Node"], ...shares.map(each =>
      [each.rank, each.share, (each.weight_bytes / 1e6).toFixed(1) + " MB", each.dtype, each.device, each.node])], true);
    rows("facts", Object.entries({ ...facts, ...sampling }).map(([name, value]) =>
      [name.replaceAll("_", " "), Array.isArray(value) ? value.join(", ") : String(value)]));
  },

  rate(name, index) {
    const now = this.samples[index], before = this.samples[Math.max(0, index - 3)];
    const gained = sum(now.metrics["llama_" + name]) - sum(before.metrics["llama_" + name]);
    return index ? Math.max(0, gained / (now.at - before.at)) : 0;
  },
};

/** Prometheus text as {name: {labels: value}}. */
function parseMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const parts = /^(llama_\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (parts) (found[parts[1]] ??= {})[parts[2] ?? ""] = Number(parts[3]);
  }
  return found;
}

function sum(series) { return Object.values(series ?? {}).reduce((total, value) => total + value, 0) }

function plot(title, series, unit = "") {
  const node = element("section", "plot"), largest = Math.max(1e-9, ...series.flatMap(each => each.values));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 119 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", title);
  const shown = series.map(({ label, values }, index) => {
    const line = document.createElementNS(svg.namespaceURI, "polyline");
    const first = KEPT - values.length;
    line.setAttribute("points", values.map((value, at) => `${first + at},${39 - 38 * value / largest}`).join(" "));
    line.setAttribute("vector-effect", "non-scaling-stroke");
    line.setAttribute("class", "series" + (index % 3 + 1));
    svg.append(line);
    const latest = values.at(-1) ?? 0;
    const text = `${latest >= 100 || Number.isInteger(latest) ? latest.toFixed(0) : latest.toFixed(1)}${unit && " " + unit}${label && " " + label}`;
    return element("span", series.length > 1 ? "series" + (index % 3 + 1) : "", text);
  });
  const output = element("output", "", shown.length ? "" : "not measured");
  output.append(...shown);
  node.append(element("h3", "", title), output, svg);
  return node;
}

function rows(id, lines, hasHead = false) {
  $(id).replaceChildren(...lines.map((cells, index) => {
    const row = element("tr");
    cells.forEach((cell, column) => row.append(element((hasHead ? !index : !column) ? "th" : "td", "", String(cell))));
    return row;
  }));
}
