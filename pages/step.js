// `plan --timeline`: a training step, played. The program has recorded each walk as cells (training/timeline.h); this
// page replays them: memory by kind over time, what lives in each layer and chunk, and the operation that runs.
"use strict";

// What passes from row to row, and its gradient: K and V of attention, and of a convolution the last rows before each tile.
const convolves = (data.walks ?? []).some((walk) => walk.timeline.names.includes("convolution"));
const [passed, itsGradient] = convolves ? ["summary", "gradient of the summary"] : ["K, V", "dK, dV"];

const kinds = [  // from the bottom up: name, colour, and what the page calls it
  ["weights", "grey1"], ["token stream", "grey1"], ["optimizer", "grey2"], ["gradients", "grey3"],
  ["float32 gradient sums", "grey3"], ["saved layer inputs", "blue"], ["kept activations", "violet"],
  ["keys and values", "teal", `${passed}, ${itsGradient}`], ["chunk activations", "red", "activations"], ["logits", "amber"],
];
const keyOf = ([name, colour, called = name]) => key(colour, called);
const indexOf = ([name]) => data.kinds.indexOf(name);

const formulas = {
  embedding: "x[t] = E[token of t]", "embedding dw": "dE[token of t] += dx[t]",
  norm: "y = g · x / √(mean(x²) + ε)",
  "norm backward": "dx = (g·dy − x̂ · mean(g·dy·x̂)) / σ;   dg += Σ rows dy·x̂",
  matmul: "y = x Wᵀ + b", "matmul dx": "dx = dy W",
  "matmul dw": "dW += dyᵀ x, in tiles of rows, the last one first",
  "bias gradient": "db += Σ rows dy",
  "norm and rope": "q, k ← rotate(norm(q), norm(k)) by angles position · θᵢ",
  "norm and rope backward": "dq, dk ← norm backward of rotate⁻¹(dq, dk)",
  rope: "q, k ← rotate(q, k) by angles position · θᵢ",
  "rope backward": "dq, dk ← rotate⁻¹(dq, dk)",
  attention: "out[t] = Σ s ≤ t  softmax(q[t]·k[s] / √d) v[s]",
  "attention backward": "dv[s] += p[t,s] dout[t];   ds = p (dout·v − Σ);   dq[t] += ds k[s];   dk[s] += ds q[t]",
  "convolution inputs": "u = b · x",
  convolution: "z[t] = Σ k < width  w[k] u[t−k];   y[t] = c[t] · z[t], or silu(z[t])",
  "delta gates": "β = σ(b);   g = −exp(A) softplus(a + dt)",
  "delta gates backward": "db = dβ · β (1 − β);   da = −dg · exp(A) σ(a + dt)",
  "delta rule": "S = exp(g) S;   S += k (β (v − Sᵀ k))ᵀ;   o = Sᵀ q",
  "delta rule backward": "dS, from the last row to the first;   from it dq, dk, dv, dβ, dg",
  "convolution edges backward": "du of the rows before a tile, from the tile",
  "convolution backward": "dz = dy · c;   dc = dy · z;   dw[k] += Σ t  dz[t] u[t−k];   du[t] = Σ k  w[k] dz[t+k]",
  route: "p = softmax or σ of the router's logits;   the largest choose the experts and weigh them",
  "sort by expert": "the rows of each expert, one expert after the other", gather: "x of these rows",
  "route backward": "dx = p (dp − Σ p dp)", "combine backward": "dweight = da · a;   da, a ← weight · da, a",
  "count experts": "rows and Σ p of each expert", "balance backward": "dx += p (slope − Σ p slope)",
  activation: "a = silu(gate) · up",
  "activation backward": "dgate = da·up·silu′(gate);   dup = da·silu(gate)",
  softmax: "log p = logit of the target − log Σ exp(logits);   dlogits = w (1[target] − p)",
  "soft cap": "y = cap · tanh(x / cap)",
  scale: "y = s · x", add: "y += x", zero: "y = 0",
  transpose: "K, V, tile by tile, as attention reads them", convert: "the same numbers in another type",
  combine: "the parts of attention's heads in one matrix",
  dequantise: "W = value of 4 bits · scale of the block",
  "gradient norm": "‖g‖ = √Σ g²",
  adamw: "m ← β₁m + (1−β₁)g;   v ← β₂v + (1−β₂)g²;   w ← w − η (m̂ / (√v̂ + ε) + λw)",
  "adamw 8-bit": "AdamW, its moments in blocks of 8 bits",
  "rows to heads": "each rank gives its rows of all heads, and gets all rows of its heads",
  "heads to rows": "the way back",
  "share gradients": "each rank gets all ranks' sums of its shard",
  "share weights": "each rank sends the rows that it has updated",
  "gather weights": "the layer's shards come from all ranks", "wait for far memory": "until a copy has arrived",
};

const passes = {  // colour, and the line of streambp.cuh
  forward: ["green", "layer.forward(", "forward"],
  summary: ["teal", "layer.summarise(", convolves ? "recompute the summary" : "recompute the summary: K, V"],
  recompute: ["violet", "layer.recompute(", "recompute the chunk"],
  backward: ["red", "layer.backward(", "backward"],
  "head forward": ["green", "head.forward(", "head: logits and log-probs"],
  "head backward": ["red", "head.backward(", "head: logits, and back"],
};

const walks = (data.walks ?? []).map((walk, i) => new Walk(walk, i));
const now = { walk: walks.find((w) => w.selected) ?? walks[0], seconds: 0, playing: false, speed: 1 };

// Full memory may leave the picture.
const longest = Math.max(...walks.map((w) => w.duration)), peaks = walks.map((w) => w.peak).sort((a, b) => b - a);
const ceiling = Math.min(1.08 * peaks[0], 1.5 * (peaks[1] ?? peaks[0]));
// Each column of pixels shows the highest cell in it.
function paintMemory(walk, chart, context) {
  const layers = kinds.map((kind) => [indexOf(kind), colour(kind[1])]), right = chart.left + chart.width;
  let cell = 0;
  for (let px = Math.floor(chart.left); px < right && chart.inverse(px) <= walk.duration; ++px) {
    let highest = cell, below = 0;
    while (cell + 1 < walk.size && walk.time[cell + 1] < chart.inverse(px + 1))
      if (walk.total[++cell] > walk.total[highest]) highest = cell;
    const bytes = walk.bytes(highest);
    for (const [kind, style] of layers) {
      if (!bytes[kind]) continue;
      const top = chart.py(below + bytes[kind]);
      context.fillStyle = style, context.fillRect(px, top, 1, chart.py(below) - top);
      below += bytes[kind];
    }
  }
}
function paintPeak(walk, chart, context) {
  const outside = walk.peak > ceiling, text = format.bytes(walk.peak) + (outside ? " ↑" : "");
  context.font = "600 12px system-ui";
  const { width } = context.measureText(text), right = chart.left + chart.width - width - 2;
  const x = Math.min(chart.px(walk.time[walk.total.indexOf(walk.peak)]) + 4, right);
  const y = outside ? 14 : Math.max(8, chart.py(walk.peak) - 9);
  if (outside) fill(context, "paper", x - 3, y - 8, width + 6, 16);
  write(context, "ink", "left", text, x, y);
}
function paintLimit(chart, context) {
  context.globalAlpha = 0.6;
  for (let x = chart.left; x < chart.left + chart.width; x += 7) fill(context, "ink", x, chart.py(data.memory), 4, 1);
  context.globalAlpha = 1;
}

const charts = walks.map((walk) => new Chart({
  title: walk.name, said: walk.what, height: 190,
  label: `${walk.name}: memory over the step, at most ${format.bytes(walk.peak)}, ${format.seconds(walk.duration)}`,
  x: { low: 0, high: longest, format: (x) => `${rounded(x)}`, label: "predicted seconds" },
  y: { low: 0, high: ceiling, format: format.bytes, unit: unitOf(ceiling) },
  choose: (x) => go(x, walk),
  paint(chart, context) {
    paintMemory(walk, chart, context), paintPeak(walk, chart, context);
    if (data.memory) paintLimit(chart, context);
  },
}));

// The model as a grid of layers by columns: layer 0 at the bottom, the head at the top.
class Grid {
  constructor(walk, context, width, height) {
    const left = 62, w = (width - left - 2) / walk.columns, h = (height - 30) / (data.layers + 1);
    Object.assign(this, { walk, context, left, w, h });
  }
  x(column) { return this.left + column * this.w; }
  y(layer) { return (data.layers - layer) * this.h; }
  paintNames() {
    const say = (text, layer) => write(this.context, "soft", "right", text, this.left - 6, this.y(layer) + this.h / 2);
    this.context.textBaseline = "middle";
    say("head", data.layers);
    for (let layer = 0; layer < data.layers; layer += Math.ceil(14 / this.h)) say(`layer ${layer}`, layer);
  }
  paintLiving({ input, kept, kv, dkv }) {
    for (let layer = 0; layer < data.layers; ++layer)
      for (let column = 0; column < this.walk.columns; ++column) {
        const box = (...look) => this.paintBox(layer, column, ...look);
        box("raised", 0, 1);
        if (input[layer][column]) box("blue", 0, 1, this.walk.far_inputs ? 0.25 : 0.55);
        if (kept[layer][column]) box("violet", 0, 0.35);
        if (kv[layer][column]) box("teal", 0.62, 1);
        if (dkv[layer][column]) box("amber", 0.35, 0.66, dkv[layer][column] === 2 ? 1 : 0.45);
      }
  }
  // A part of a field, from and to in shares of its height.
  paintBox(layer, column, name, from, to, alpha = 1) {
    const { context, w, h } = this, gap = Math.min(1, w / 5, h / 5), inner = h - 2 * gap;
    const x = this.x(column) + gap, y = this.y(layer) + gap + from * inner;
    context.globalAlpha = alpha;
    fill(context, name, x, y, Math.max(w - 2 * gap, 0.5), (to - from) * inner);
    context.globalAlpha = 1;
  }
  paintFreed({ layer, from, to }) {
    const { context } = this;
    context.strokeStyle = colour("soft"), context.setLineDash([3, 3]);
    context.strokeRect(this.x(from), this.y(layer) + 1, (to - from) * this.w, this.h - 2);
    context.setLineDash([]);
  }
  paintRunning(cell, part) {
    const { walk, context } = this, layer = walk.layer[cell], begin = walk.begin[cell], name = passes[part][0];
    const from = this.x(begin / walk.chunk), to = this.x(walk.end[cell] / walk.chunk);
    fill(context, name, from, this.y(layer), Math.max(to - from, 2), this.h);
    if (layer === data.layers || part === "summary") return;
    // A mixer reads the summary of earlier rows; backward adds to the gradient of it.
    const windowed = data.window > 0 && data.local[layer];
    const reach = this.x(windowed ? Math.max(0, begin - data.window) / walk.chunk : 0);
    if (from - reach < 14) return;
    if (part === "backward") this.paintArrow(layer, name, itsGradient, from, reach);
    else this.paintArrow(layer, name, passed, reach, from);
  }
  paintArrow(layer, name, text, tail, tip) {
    const { context, h } = this, y = this.y(layer), middle = y + 0.2 * h, back = tip < tail ? 1 : -1;
    context.fillStyle = context.strokeStyle = colour(name);
    path(context, [tail, middle], [tip + back, middle]), context.stroke();
    path(context, [tip, middle], [tip + 8 * back, middle - 4], [tip + 8 * back, middle + 4]), context.fill();
    write(context, "ink", "center", text, (tip + tail) / 2, y + (layer === data.layers - 1 ? h + 8 : -7));
  }
}
const gridHeight = 30 + Math.min(560, Math.max(180, 14 * (data.layers + 1)));
const grid = new Picture(gridHeight, "The model as a grid of layers by chunks", (context, width, height) => {
  const { walk } = now, { cell, operation } = walk.at(now.seconds), state = walk.lives(cell);
  const picture = new Grid(walk, context, width, height);
  context.lineWidth = 1.5;
  picture.paintNames(), picture.paintLiving(state);
  if (state.freed) picture.paintFreed(state.freed);
  if (walk.layer[cell] >= 0) picture.paintRunning(cell, walk.part(cell, operation));
});

const source = (data.source ?? "").split("\n");
const lineOf = (snippet) => source.findIndex((text) => text.includes(snippet));
function describe(walk, cell, part, { name }) {
  const layer = walk.layer[cell], rows = `rows ${format.whole(walk.begin[cell])} to ${format.whole(walk.end[cell])}`;
  if (layer >= 0) return `${layer === data.layers ? "" : `Layer ${layer}: `}${passes[part][2]}, ${rows}`;
  if (/adamw|momentum|direction|share weights|gradient norm/.test(name)) return "The optimizer's update";
  return name.startsWith("embedding") ? "Below layer 0" : "Between two passes: gradient sums begin or end";
}
// The numbers at the cursor.
function numbersAt(walk, seconds) {
  const { cell, operation, from } = walk.at(seconds), { all } = walk.list[cell], op = all[operation];
  const before = (what) => sum(all.slice(0, operation), (o) => o[what]);
  return { cell, operation, from, op, part: walk.part(cell, operation), bytes: walk.bytes(cell, op),
    flops: walk.work[cell] + before("flops"), sent: walk.wire[cell] + before("sent"),
    copied: walk.far[cell] + before("copied") };
}

const what = subheading(""), formula = paragraph(), numbers = element("div");
const code = element("pre", { tabindex: "0", "aria-label": "the lines of streambp.cuh that run" });
const live = element("p", { class: "soft", "aria-live": "polite" });
function showOperation({ name, flops, seconds, sent, copied }) {
  const costs = [format.flops(flops), format.seconds(seconds)];
  if (sent) costs.push(`sends ${format.bytes(sent)}`);
  if (copied) costs.push(`copies ${format.bytes(copied)} from or to far memory`);
  const soft = span("soft", costs.join(", "));
  formula.replaceChildren(element("b", {}, name), `  ${formulas[name] ?? ""}`, element("br"), soft);
}

// The line that runs, with the lines around it.
const snippets = { embedding: "embed(dev, c, x", "embedding dw": "embedding_gradient(sums, s" };
function showCode({ part, op }) {
  const snippet = passes[part]?.[1] ?? snippets[op.name], running = snippet ? lineOf(snippet) : -1;
  if (running < 0) return code.replaceChildren("(memory/sums.h, memory/weights.h or training/optimizer.h)");
  const lines = source.slice(running - 5, running + 4), numberOf = (i) => `${running - 4 + i}`.padStart(3);
  const indent = Math.min(...lines.filter((text) => text).map((text) => text.search(/\S/)));
  const shown = lines.map((text, i) => `${numberOf(i)}  ${text.slice(indent)}\n`);
  code.replaceChildren(...shown.map((text, i) => element(i === 5 ? "mark" : "span", {}, text)));
}
function showNumbers(walk, at) {
  const ever = (kind) => at.bytes[indexOf(kind)] > 0 || walk.memory[indexOf(kind)].some((bytes) => bytes > 0);
  const rows = kinds.filter(ever).reverse().map((kind) => [keyOf(kind), format.bytes(at.bytes[indexOf(kind)])]);
  rows.push([element("b", {}, "memory in use"), format.bytes(sum(at.bytes))],
    ["work so far", `${format.flops(at.flops)} of ${format.flops(walk.work[walk.size])}`],
    ["predicted time so far", `${format.seconds(now.seconds)} of ${format.seconds(walk.duration)}`]);
  if (data.ranks > 1) rows.push(["sent to other ranks so far", format.bytes(at.sent)]);
  if (walk.far[walk.size] > 0) rows.push(["copied to and from far memory so far", format.bytes(at.copied)]);
  numbers.replaceChildren(table([], rows));
}
function show() {
  const { walk } = now, at = numbersAt(walk, now.seconds), inUse = format.bytes(sum(at.bytes));
  what.textContent = describe(walk, at.cell, at.part, at.op);
  showOperation(at.op), showCode(at), showNumbers(walk, at);
  slider.value = Math.round((100000 * now.seconds) / walk.duration);
  slider.setAttribute("aria-valuetext", `${what.textContent}, ${inUse}`);
  if (!now.playing) live.textContent = `${what.textContent}: ${at.op.name}. ${inUse} in use.`;
  for (const chart of charts) chart.cursor = now.seconds, chart.picture.redraw();
  grid.redraw();
  choices.forEach((choice, i) => choice.setAttribute("aria-pressed", walk.number === i));
}

function go(seconds, walk = now.walk) {
  now.walk = walk;
  now.seconds = Math.min(Math.max(seconds, 0), walk.duration - 1e-9);
  show();
}
// Moves by whole operations or cells.
function step(cells, operations) {
  const { walk } = now, { cell, operation } = walk.at(now.seconds);
  play(false);
  if (cells) return go(walk.time[Math.min(Math.max(cell + cells, 0), walk.size - 1)] + 1e-12);
  const { all } = walk.list[cell], next = operation + operations;
  if (next >= all.length) return step(1, 0);
  if (next >= 0) return go(walk.time[cell] + sum(all.slice(0, next), (o) => o.seconds) + 1e-12);
  if (cell > 0) go(walk.time[cell] - walk.list[cell - 1].all.at(-1).seconds / 2);
}
function play(on) {
  const starts = on && !now.playing;
  now.playing = on;
  playButton.textContent = on ? "Pause" : "Play";
  if (!starts) return;
  if (now.seconds > 0.999 * now.walk.duration) now.seconds = 0;
  let last = null;
  const frame = (time) => {
    if (!now.playing) return;
    if (last !== null) go(now.seconds + ((time - last) / 60000) * now.speed * now.walk.duration);
    last = time;
    if (now.seconds > 0.9999 * now.walk.duration) return play(false);
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}
const choices = walks.map((walk) =>
  button(walk.name, () => go(Math.min(now.seconds / now.walk.duration, 1) * walk.duration, walk)));
const playButton = button("Play", () => play(!now.playing));
const speeds = [["0.1", "slow"], ["1", "a minute"], ["4", "fast"]];
const speed = element("select", { "aria-label": "speed", onchange: () => (now.speed = Number(speed.value)) },
  speeds.map(([value, text]) => element("option", { value, selected: value === "1" }, text)));
const slider = element("input", { type: "range", min: 0, max: 100000, "aria-label": "time in the step",
  oninput: () => go((slider.value / 100000) * now.walk.duration) });
function overview() {
  const shown = kinds.filter(([name]) => !["token stream", "float32 gradient sums"].includes(name));
  const titles = ["", "peak", "predicted time", "work", "chunk", "keeps beside layer inputs"];
  const rows = walks.map((w) => [w.name, format.bytes(w.peak), format.seconds(w.seconds), format.flops(w.flops),
    w.columns === 1 ? "all rows" : `${format.whole(w.chunk)} rows`, w.kept]);
  const far = walks.some((w) => w.far[w.size] > 0);
  return [heading("Memory over the step"),
    soft(shown.map(keyOf), data.memory ? `dashed: ${format.bytes(data.memory)}` : ""),
    div("panels", charts.map((chart) => chart.figure)), table(titles, rows),
    far ? soft("The charts show the time of computing; waiting for far memory is only in the table.") : []];
}
// The charts, and the player below them.
function player() {
  const words = caption(
    key("blue", `layer input kept${walks.some((w) => w.far_inputs) ? " (pale: in far memory)" : ""}`),
    key("violet", "more kept"), key("teal", passed),
    key("amber", `${itsGradient}: pale until all later rows have added`), "dashed: just freed. ",
    "Columns are chunks of rows, the first row at the left. Solid: what is computed now, ",
    key("green", "forward"), key("violet", "recomputed"), key("red", "backward"));
  const ways = element("div", { class: "controls", role: "group", "aria-label": "which way" }, choices);
  const moves = div("controls", playButton,
    button("◀ cell", () => step(-1, 0)), button("◀ operation", () => step(0, -1)),
    button("operation ▶", () => step(0, 1)), button("cell ▶", () => step(1, 0)), speed, slider);
  const picture = element("figure", {}, grid.canvas, words);
  return [overview(), heading("The step, played"), div("sticky", ways, moves),
    div("beside", picture, element("div", {}, what, formula, code, numbers)), live];
}

// Of a step with many micro-batches, or on several ranks, a part is shown.
function shownPart({ micro_batches, ranks = 1, sequence_ranks = 1 }) {
  const shared = sequence_ranks > 1 ? ` A chunk has rows of the ${sequence_ranks} ranks that share a stream.` : "";
  const two = "Two micro-batches are played; the others are like the second. The table has the whole step.";
  return [micro_batches > 2 * (ranks / sequence_ranks) ? paragraph(two) : [],
    ranks > 1 ? paragraph(`Memory and work are those of rank 0 of ${ranks}.${shared}`) : []];
}
const introduction = ({ model, length, dtype, optimizer }) => [
  paragraph(`${model}. One training step on ${format.whole(length)} tokens, ${dtype}, ` +
    `${optimizer === "none" ? "no optimizer" : `optimizer ${optimizer}`}, recorded from the program's own walk, which ` +
    "runs on a device that only counts. All ways below compute the same gradient, bit for bit; they differ in what is " +
    "in memory, and when."),
  paragraph("A step goes up through the layers (forward), then down (backward). Backward needs the activations of " +
    "forward: full memory keeps them, checkpointing computes a whole layer again, and StreamBP computes one chunk of " +
    "a layer again, the last chunk first, because only the row itself and later rows add to a row's dK and dV."),
];

if (walks.length > 0 && data.title) {
  page(data.title, introduction(data), shownPart(data), player(), soft("Made by ", monospace(data.command)));
  const [number, share] = location.hash.slice(1).split(":").map(Number);  // page.html#2:0.6
  const walk = (location.hash && walks[number]) || now.walk;
  go((share || 0) * walk.duration, walk);
}
