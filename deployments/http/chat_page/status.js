// The status view: plots of the last two minutes from one replica's metrics, the ranks' shares, and the model's facts.

const SHOWN_S = 120;     // of each plot
const SILENT_S = 10;     // after which another replica's answers count
// Of /props, and plotted from /metrics: values of two moments would differ.
const PLOTTED = new Set(["requests_running", "requests_waiting", "blocks_used"]);

const statusView = {
  timer: null,
  samples: [],           // {at, metrics} of one replica; each request may reach another one
  replica: null,
  props: null,

  async open() {
    $("status-view").showModal();
    clearInterval(this.timer);
    this.timer = setInterval(() => this.update(), 1000);
    await this.update();
  },

  async update() {
    try {
      const [metrics, props] = await Promise.all([fetch(new URL("metrics", base)), fetch(new URL("props", base))]);
      if (!metrics.ok || !props.ok) return;
      const at = performance.now() / 1000, isSilent = at - (this.samples.at(-1)?.at ?? -SILENT_S) >= SILENT_S;
      if (isSilent) Object.assign(this, { replica: metrics.headers.get("x-replica"), samples: [], props: null });
      if (props.headers.get("x-replica") === this.replica) this.props = await props.json();
      if (metrics.headers.get("x-replica") !== this.replica) return;
      this.samples = this.samples.filter(each => at - each.at < SHOWN_S);
      this.samples.push({ at, metrics: parseMetrics(await metrics.text()) });
      this.show();
    } catch { /* the next second tries again */ }
  },

  show() {
    const gauge = name => [{ label: "", values: this.samples.map(({ metrics }) => sum(metrics["llama_" + name])) }];
    const rate = (name, label) => ({ label, values: this.samples.map((sample, index) => this.rate(name, index)) });
    const ranks = Object.keys(this.samples.at(-1).metrics.llama_rank_step_seconds ?? {});
    const perRank = ranks.map(key => ({
      label: "rank " + (/rank="(\d+)"/.exec(key)?.[1] ?? ""),
      values: this.samples.map(({ metrics }) => 1000 * (metrics.llama_rank_step_seconds?.[key] ?? 0)),
    }));
    const usage = gauge("kv_cache_usage_perc").map(each => ({ ...each, values: each.values.map(value => 100 * value) }));
    const times = this.samples.map(({ at }) => at);
    $("plots").replaceChildren(
      plot("Sequences running", times, gauge("num_requests_running")),
      plot("Sequences waiting", times, gauge("num_requests_waiting")),
      plot("Cache in use", times, usage, "%"),
      plot("Tokens a second", times, [rate("generation_tokens_total", "new"), rate("prompt_tokens_total", "prompt")]),
      ...(ranks.length ? [plot("Step of a rank", times, perRank, "ms")] : []),  // measured once a step has run
      plot("Restarts of the ranks", times, gauge("rank_restarts_total")),
    );
    if (!this.props) return;
    const { ranks: shares, engines, sampling_defaults: sampling, ...facts } = this.props;
    rows("engines", [["Engine", "Model", "Node", "State", "Requests", "Running", "Waiting"], ...engines.map(each => Object.values(each))], true);
    rows("ranks", [["Rank", "Share", "Weights", "Type", "Device", "Node"], ...shares.map(each =>
      [each.rank, each.share, (each.weight_bytes / 1e6).toFixed(1) + " MB", each.dtype, each.device, each.node])], true);
    const lines = Object.entries({ ...facts, ...sampling }).filter(([name]) => !PLOTTED.has(name));
    rows("facts", lines.map(([name, value]) => [name.replaceAll("_", " "), Array.isArray(value) ? value.join(", ") : String(value)]));
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

/** times: of the values, in seconds. They fill the width, so that one sample is a line too. */
function plot(title, times, series, unit = "") {
  const node = element("section", "plot"), largest = Math.max(1e-9, ...series.flatMap(each => each.values));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 119 40");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", title);
  const shown = series.map(({ label, values }, index) => {
    const line = document.createElementNS(svg.namespaceURI, "polyline");
    const points = values.map((value, index) => [times[index] - times[0], value]);
    if (points.length === 1) points.push([1, values[0]]);
    const width = 119 / points.at(-1)[0];
    line.setAttribute("points", points.map(([at, value]) => `${width * at},${39 - 38 * value / largest}`).join(" "));
    line.setAttribute("vector-effect", "non-scaling-stroke");
    line.setAttribute("class", "series" + (index % 3 + 1));
    svg.append(line);
    const latest = values.at(-1) ?? 0;
    const text = `${latest >= 100 || Number.isInteger(latest) ? latest.toFixed(0) : latest.toFixed(1)}${unit && " " + unit}${label && " " + label}`;
    return element("span", series.length > 1 ? "series" + (index % 3 + 1) : "", text);
  });
  const output = element("output");
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
