// Behind a router: its replicas, the batch of each, and where a stream moved.
const fleet = {
  router: false,
  views: new Map(),  // address -> {batch, node, line, problem}
  listed: "",

  async tell(seen) {
    this.router = true;
    at("single").hidden = true;
    at("fleet").hidden = false;
    at("engine-title").textContent = "The fleet, step by step";
    for (const address of this.views.keys()) {
      if (!seen.replicas.some((one) => one.address === address)) this.views.delete(address);
    }
    for (const one of seen.replicas) if (!this.views.has(one.address)) this.views.set(one.address, this.viewOf(one));
    const nodes = seen.replicas.map((one) => this.views.get(one.address).node);
    if (nodes.some((node, i) => at("replicas").children[i] !== node)) at("replicas").replaceChildren(...nodes);
    await Promise.all(seen.replicas.map((one) => this.look(one)));
    this.drawTiles(seen);
    this.drawMoves(seen);
    this.list(seen);
  },

  // Models of replicas that take no requests yet stand in the list with the reason.
  list(seen) {
    const coming = new Map();
    for (const one of seen.replicas) {
      if (!one.healthy) for (const name of one.models) coming.set(name, this.stateOf(one));
    }
    const told = JSON.stringify([[...coming], seen.replicas.map((one) => one.healthy)]);
    if (told !== this.listed) listModels(coming);
    this.listed = told;
  },

  stateOf(one) {
    if (one.aside) return "put aside for its failures";
    return one.healthy ? "takes requests" : one.trouble || "does not answer";
  },

  viewOf(one) {
    const canvas = el("canvas", {role: "img", ariaLabel: "The batch"});
    const line = el("p", {className: "note"});
    const node = el("div", {className: "replica"}, el("strong", {}, one.address), line, canvas);
    return {batch: new Batch(canvas), node, line};
  },

  async look(one) {
    const view = this.views.get(one.address);
    view.node.classList.toggle("gone", !one.healthy);
    const parts = [this.stateOf(one), `${one.open} requests from here`];
    if (one.models.length) parts.push(one.models.join(", "));
    if (one.healthy) parts.push(...await this.lookInside(one, view));
    view.line.textContent = parts.join(" · ");
  },

  async lookInside(one, view) {
    const query = new URLSearchParams({replica: one.address, since: view.batch.since});
    try {
      const reply = await fetch(`v1/live?${query}`, {headers: headers(at("admin").value || at("key").value)});
      if (!reply.ok) return [await refusal(reply)];
      view.batch.take(await reply.json());
      view.batch.draw();
    } catch { return ["its batch cannot be seen"]; }
    const {running = 0, waiting = 0} = view.batch.seen.figures;
    return [`${running} running, ${waiting} waiting`, `${view.batch.pace().toFixed(0)} tokens/s`];
  },

  drawTiles(seen) {
    const there = seen.replicas.filter((one) => one.healthy);
    const views = there.map((one) => this.views.get(one.address)).filter((view) => view.batch.seen);
    const sum = (of) => views.reduce((total, view) => total + of(view.batch), 0);
    const running = sum((one) => one.seen.figures.running || 0);
    const waiting = sum((one) => one.seen.figures.waiting || 0);
    const healthy = there.length;
    drawFigures([
      ["Tokens/s", sum((one) => one.pace()).toFixed(0)],
      ["Running / waiting", `${running} / ${waiting}`],
      ["TTFT p50 / p99", spread(views.flatMap((view) => firstTokens(view.batch.seen)))],
      ["ITL p50 / p99", spread(views.flatMap((view) => view.batch.gaps()))],
      ["Replicas", `${healthy} of ${seen.replicas.length}`],
      ["Streams moved", String(seen.moved)],
    ], []);
    at("state").textContent = `router · ${healthy} of ${seen.replicas.length} replicas · ${seen.active} under way`;
  },

  drawMoves(seen) {
    const line = (move) => {
      const ago = (seen.now_s - move.at_s).toFixed(0);
      return el("li", {}, `${move.request}: from ${move.from} to ${move.to}, after ${move.tokens} tokens, ${ago} s ago`);
    };
    const lines = seen.moves.length ? seen.moves.map(line).reverse() : [el("li", {}, "None so far.")];
    at("moves").replaceChildren(...lines);
  },
};
