// What stays between visits, on this device only: settings, and conversations without their probabilities.

const store = {
  get(key) { try { return localStorage.getItem("llama." + key) } catch { return null } },
  drop(key) { try { localStorage.removeItem("llama." + key) } catch { /* a private window */ } },
  set(key, value) {
    try { localStorage.setItem("llama." + key, value); return true } catch { return false }   // full, or a private window
  },
};

const conversations = {
  all: [],          // newest first: {id, title, turns: [{role, content, reasoning?, calls?, tool_call_id?}]}
  current: null,

  load() {
    try { this.all = JSON.parse(store.get("conversations")) ?? [] } catch { this.all = [] }
    this.current = this.all.find(each => each.id === store.get("current")) ?? null;
  },
  begin() { this.open({ id: crypto.randomUUID?.() ?? String(Math.random()), title: "", turns: [] }) },
  open(conversation) {
    this.current = conversation;
    store.set("current", conversation.id);
  },
  remove(conversation) {
    this.all = this.all.filter(each => each !== conversation);
    if (this.current === conversation) this.begin();
    this.save();
  },
  /** Drops the oldest conversations where the browser has no room for all. */
  save() {
    const { current } = this;
    if (current?.turns.length && !this.all.includes(current)) this.all.unshift(current);
    if (current && !current.title) current.title = (current.turns[0]?.content ?? "").slice(0, 60);
    const kept = this.all.map(each => ({ ...each, turns: each.turns.map(({ node, tokens, failed, ...turn }) => turn) }));
    while (!store.set("conversations", JSON.stringify(kept)) && kept.length > 1) kept.pop();
  },
};
