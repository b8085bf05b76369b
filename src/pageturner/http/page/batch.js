// The batch of one server, drawn from its last steps: a column for each step, a row for each request.
const COLUMNS = 90, LEFT = 42, TOP = 6, ROWS_HIGH = 150, GAP = 6, TIMES_HIGH = 34, FOOT = 16;
const MIN_ROWS = 16, MAX_ROWS = 64;

const colours = new Map();  // of the theme that is shown, as a canvas takes them

function colour(name) {
  if (!colours.has(name)) {
    at("tip").style.accentColor = `var(--${name})`;
    colours.set(name, getComputedStyle(at("tip")).accentColor);
  }
  return colours.get(name);
}

function canvasOf(canvas, height) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth;
  const size = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) {
    [canvas.width, canvas.height] = size;
    canvas.style.height = height + "px";
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return [pen, width];
}

class Batch {
  constructor(canvas) {
    this.canvas = canvas;
    this.steps = [];
    this.cells = [];  // of the last drawing: [x, y, id, tokens, whether of a prompt, step]
    this.rows = new Map();  // request id -> row
    this.since = 0;
    this.epoch = 0;
    this.seen = null;  // the last answer of /v1/live
  }

  take(seen) {
    if (seen.epoch !== this.epoch) {
      this.epoch = seen.epoch;
      this.since = 0;
      this.steps.length = 0;
      this.rows.clear();
    }
    for (const step of seen.steps) {
      const known = this.steps.findIndex((one) => one.number === step.number);
      if (known >= 0) this.steps[known] = step;
      else this.steps.push(step);
    }
    this.steps.splice(0, Math.max(0, this.steps.length - COLUMNS));
    const ended = this.steps.filter((step) => step.ended_s);  // one that runs is asked for again
    if (ended.length) this.since = Math.max(this.since, ended[ended.length - 1].number);
    this.seen = seen;
  }

  // Each request that is seen has a row, and gives it back when it is long gone.
  placeRows() {
    const present = new Set(this.seen.requests.map((one) => one.id));
    for (const step of this.steps) for (const [id] of step.rows) present.add(id);
    for (const id of this.rows.keys()) if (!present.has(id)) this.rows.delete(id);
    const taken = new Set(this.rows.values());
    for (const id of present) {
      if (this.rows.has(id)) continue;
      let row = 0;
      while (taken.has(row)) row++;
      taken.add(row);
      this.rows.set(id, row);
    }
  }

  draw() {
    const height = TOP + ROWS_HIGH + GAP + TIMES_HIGH + FOOT;
    const [pen, width] = canvasOf(this.canvas, height);
    this.placeRows();
    const used = Math.max(0, ...this.rows.values()) + 1;
    const count = Math.min(MAX_ROWS, Math.max(MIN_ROWS, used));
    this.shape = {wide: (width - LEFT) / COLUMNS, high: ROWS_HIGH / count, count, width};
    this.cells.length = 0;
    this.drawAxes(pen);
    this.drawRows(pen);
    this.drawTimes(pen);
    const last = this.steps[this.steps.length - 1];
    const prompts = last ? last.rows.filter((row) => row[2]).length : 0;
    const label = last ? `The batch: the last step has ${last.rows.length} requests, ${prompts} of them at their prompt` : "The batch: no step yet";
    this.canvas.setAttribute("aria-label", label);
  }

  columnOf(i) {
    return LEFT + (COLUMNS - this.steps.length + i) * this.shape.wide;
  }

  drawAxes(pen) {
    const {high, count, width} = this.shape, bottom = TOP + ROWS_HIGH;
    pen.fillStyle = colour("soft");
    pen.textAlign = "right";
    for (const row of [1, count / 2, count]) {
      pen.fillText(String(Math.round(row)), LEFT - 5, TOP + high * row - high / 2 + 4);
    }
    pen.strokeStyle = colour("rule");
    pen.strokeRect(LEFT - 0.5, TOP - 0.5, width - LEFT, ROWS_HIGH + 1);
    pen.textAlign = "left";
    const first = this.steps[0], foot = bottom + GAP + TIMES_HIGH + 12;
    if (!first) {
      pen.fillText("No step yet.", LEFT + 8, TOP + 18);
      return;
    }
    const ago = this.seen.now_s - first.begun_s;
    pen.fillText(`${this.steps.length} steps, ${ago.toFixed(1)} s`, this.columnOf(0), foot);
    pen.textAlign = "right";
    pen.fillText("now", width, foot);
  }

  drawRows(pen) {
    const {wide, high} = this.shape, fills = [colour("decode"), colour("prefill")];
    const sizes = this.steps.flatMap((step) => step.rows.map((row) => row[1]));
    const most = Math.log(Math.max(1, ...sizes) + 1);
    const put = (x, id, thick) => {
      const y = TOP + high * this.rows.get(id);
      if (y + high > TOP + ROWS_HIGH + 1) return;
      pen.fillRect(x, y + high * (1 - thick) / 2, Math.max(1, wide - 1), high * thick);
    };
    this.steps.forEach((step, i) => {
      for (const [id, n, prompt] of step.rows) {
        pen.globalAlpha = prompt ? 0.35 + 0.65 * Math.log(n + 1) / most : 1;
        pen.fillStyle = fills[prompt];
        put(this.columnOf(i), id, 0.8);
        this.cells.push([this.columnOf(i), TOP + high * this.rows.get(id), id, n, prompt, step]);
      }
    });
    pen.globalAlpha = 1;
    pen.fillStyle = colour("wait");
    const step = this.steps[this.steps.length - 1], there = new Set(step?.rows.map((row) => row[0]));
    for (const one of step ? this.seen.requests : []) {
      if (there.has(one.id)) continue;
      put(this.columnOf(this.steps.length - 1), one.id, 0.4);
      this.cells.push([this.columnOf(this.steps.length - 1), TOP + high * this.rows.get(one.id), one.id, 0, 0, step]);
    }
  }

  // How long each step took, with the longest as the scale.
  drawTimes(pen) {
    const times = this.steps.map((step) => step.ended_s ? 1000 * (step.ended_s - step.begun_s) : 0);
    const most = Math.max(...times, 0), bottom = TOP + ROWS_HIGH + GAP + TIMES_HIGH;
    if (!most) return;
    pen.fillStyle = colour("soft");
    times.forEach((time, i) => {
      const high = TIMES_HIGH * time / most;
      pen.fillRect(this.columnOf(i), bottom - high, Math.max(1, this.shape.wide - 1), high);
    });
    pen.textAlign = "right";
    const longest = most < 10 ? `${most.toFixed(1)} ms` : ms(most);
    pen.fillText(longest, LEFT - 3, bottom - TIMES_HIGH + 9);
    pen.fillText("0", LEFT - 5, bottom);
  }

  cellUnder(event) {
    const {wide, high} = this.shape;
    const under = ([x, y]) => event.offsetX >= x && event.offsetX < x + wide && event.offsetY >= y && event.offsetY < y + high;
    return this.cells.find(under);
  }

  // Tokens a second over the steps that are drawn; 0 where the last one is long ago.
  pace() {
    const {steps} = this;
    if (steps.length < 2) return 0;
    const last = steps[steps.length - 1], span = last.begun_s - steps[0].begun_s;
    const made = steps.slice(0, -1).reduce((sum, step) => sum + step.rows.filter((row) => !row[2]).length, 0);
    return this.seen.now_s - last.begun_s < 3 && span ? made / span : 0;
  }

  // Milliseconds between two tokens of each answer.
  gaps() {
    const found = [];
    for (let i = 1; i < this.steps.length; i++) {
      const [before, step] = [this.steps[i - 1], this.steps[i]];
      if (!before.ended_s || !step.ended_s) continue;
      const there = new Set(before.rows.map((row) => row[0]));
      for (const [id, , prompt] of step.rows) {
        if (!prompt && there.has(id)) found.push(1000 * (step.ended_s - before.ended_s));
      }
    }
    return found;
  }
}
