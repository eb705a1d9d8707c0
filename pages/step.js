// `plan --timeline`: a training step, played. The program has recorded each walk as cells (training/timeline.h); this page
// replays them: memory by kind over time, what lives in each layer and chunk, and the operation that runs.
"use strict";

const kinds = [  // from the bottom up
  ["weights", "grey1"], ["token stream", "grey1"], ["optimizer", "grey2"], ["gradients", "grey3"], ["float32 gradient sums", "grey3"],
  ["saved layer inputs", "blue"], ["kept activations", "violet"], ["keys and values", "teal"], ["chunk activations", "red"], ["logits", "amber"],
];
const kindNames = { "keys and values": "K, V, dK, dV", "chunk activations": "activations" };

const formulas = {
  embedding: "x[t] = E[token of t]",
  "embedding dw": "dE[token of t] += dx[t]",
  norm: "y = g · x / √(mean(x²) + ε)",
  "norm backward": "dx = (g·dy − x̂ · mean(g·dy·x̂)) / σ;   dg += Σ rows dy·x̂",
  matmul: "y = x Wᵀ + b",
  "matmul dx": "dx = dy W",
  "matmul dw": "dW += dyᵀ x, in tiles of rows, the last one first",
  "bias gradient": "db += Σ rows dy",
  "norm and rope": "q, k ← rotate(norm(q), norm(k)) by angles position · θᵢ",
  "norm and rope backward": "dq, dk ← norm backward of rotate⁻¹(dq, dk)",
  rope: "q, k ← rotate(q, k) by angles position · θᵢ",
  "rope backward": "dq, dk ← rotate⁻¹(dq, dk)",
  attention: "out[t] = Σ s ≤ t  softmax(q[t]·k[s] / √d) v[s]",
  "attention backward": "dv[s] += p[t,s] dout[t];   ds = p (dout·v − Σ);   dq[t] += ds k[s];   dk[s] += ds q[t]",
  activation: "a = silu(gate) · up",
  "activation backward": "dgate = da·up·silu′(gate);   dup = da·silu(gate)",
  softmax: "log p = logit of the target − log Σ exp(logits);   dlogits = w (1[target] − p)",
  "soft cap": "y = cap · tanh(x / cap)",
  scale: "y = s · x",
  add: "y += x",
  zero: "y = 0",
  transpose: "K, V, tile by tile, as attention reads them",
  convert: "the same numbers in another type",
  combine: "the parts of attention's heads in one matrix",
  dequantise: "W = value of 4 bits · scale of the block",
  "gradient norm": "‖g‖ = √Σ g²",
  adamw: "m ← β₁m + (1−β₁)g;   v ← β₂v + (1−β₂)g²;   w ← w − η (m̂ / (√v̂ + ε) + λw)",
  "adamw 8-bit": "AdamW, its moments in blocks of 8 bits",
  "rows to heads": "each rank gives its rows of all heads, and gets all rows of its heads",
  "heads to rows": "the way back",
  "share gradients": "each rank gets all ranks' sums of its shard",
  "share weights": "each rank sends the rows that it has updated",
  "gather weights": "the layer's shards come from all ranks",
  "wait for far memory": "until a copy has arrived",
};

const passes = {  // colour, and the line of streambp.cuh
  forward: ["green", "layer.forward(", "forward"],
  "keys and values": ["teal", "recompute_keys_values(layer, kv,", "recompute K, V"],
  recompute: ["violet", "layer.recompute(", "recompute the chunk"],
  backward: ["red", "layer.backward(", "backward"],
  "head forward": ["green", "head.forward(", "head: logits and log-probs"],
  "head backward": ["red", "head.backward(", "head: logits, and back"],
};

function expand(runs) {
  const result = [];
  for (let i = 0, value = 0; i < runs.length; i += 2)
    for (let n = runs[i + 1]; n > 0; --n) result.push((value += runs[i]));
  return result;
}

class Walk {
  constructor(given, number) {
    Object.assign(this, given, { number });
    const { cells, operations, lists, names, passes } = given.timeline;
    this.operations = operations.map(([name, flops, micros, sent, copied, ...memory]) => {
      const delta = new Array(data.kinds.length).fill(0);
      for (let i = 0; i < memory.length; i += 2) delta[memory[i]] = memory[i + 1];
      return { name: names[name], flops, seconds: micros / 1e6, sent, copied, delta, more: delta.reduce((a, b) => a + b) };
    });
    this.lists = lists.map((list) => {
      const all = list.map((i) => this.operations[i]), sum = (what) => all.reduce((s, o) => s + o[what], 0);
      return { all, flops: sum("flops"), seconds: sum("seconds"), sent: sum("sent"), copied: sum("copied"),
        peak: all.reduce((a, b) => (b.more > a.more ? b : a)) };
    });
    this.pass = expand(cells.pass).map((i) => passes[i]);
    for (const name of ["layer", "begin", "end"]) this[name] = expand(cells[name]);
    this.list = expand(cells.list).map((i) => this.lists[i]);
    this.memory = cells.memory.map(expand);
    this.size = this.pass.length;
    for (const [name, so] of [["seconds", "time"], ["flops", "work"], ["sent", "wire"], ["copied", "far"]]) {
      this[so] = [0];
      this.list.forEach((list, i) => this[so].push(this[so][i] + list[name]));
    }
    this.total = this.list.map((list, i) => this.memory.reduce((s, of) => s + of[i], 0) + list.peak.more);
    this.peak = this.total.reduce((a, b) => Math.max(a, b));
    this.columns = Math.ceil(data.length / this.chunk);
  }
  get duration() { return this.time[this.size]; }

  // The cell at a time, and its operation.
  at(seconds) {
    let low = 0, high = this.size - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      this.time[middle] <= seconds ? (low = middle) : (high = middle - 1);
    }
    let from = this.time[low], operation = 0;
    const { all } = this.list[low];
    while (operation + 1 < all.length && from + all[operation].seconds <= seconds + 1e-12) from += all[operation++].seconds;
    return { cell: low, operation, from };
  }
  // Bytes of each kind while an operation runs; without one, at the cell's peak.
  bytes(cell, operation = this.list[cell].peak) {
    return this.memory.map((of, kind) => of[cell] + operation.delta[kind]);
  }
  // What of a cell's pass an operation is: a backward cell computes its activations again first.
  part(cell, operation) {
    if (this.pass[cell] !== "backward") return this.pass[cell];
    const first = this.list[cell].all.findIndex((o) => /backward|dx|dw/.test(o.name));
    return operation < first ? "recompute" : "backward";
  }

  // What lives while a cell is computed, by layer and column, from the walk's rules (streambp.cuh): 1, or for dK, dV 2 where
  // they are complete. freed: the layer that was closed just before.
  lives(upTo) {
    const L = data.layers, grid = () => Array.from({ length: L }, () => new Uint8Array(this.columns));
    const state = { input: grid(), kept: grid(), kv: grid(), dkv: grid(), freed: null };
    const blocks = this.block > 0 ? this.block : data.length, last = Math.floor((data.length - 1) / blocks);
    let group = null, keeps = false;
    const range = (block) => [Math.floor((block * blocks) / this.chunk), Math.min(this.columns, Math.ceil(((block + 1) * blocks) / this.chunk))];
    const close = () => {
      if (!group) return;
      const { layer, back, block } = group, [from, to] = range(block), stays = this.block > 0 && this.stays[layer];
      if (!stays && !(!back && this.keeps_kv[layer])) state.kv[layer].fill(0);
      if (back) state.input[layer].fill(0, from, to), state.kept[layer].fill(0, from, to);
      if (back && !stays) state.dkv[layer].fill(0);
      state.freed = { layer, from, to };
      group = null;
    };
    for (let i = 0; i <= upTo; ++i) {
      const pass = this.pass[i], layer = this.layer[i], back = pass !== "forward";
      if (layer < 0 || layer >= L) { close(); continue; }
      const block = Math.floor(this.begin[i] / blocks), column = Math.floor(this.begin[i] / this.chunk);
      if (!group || group.layer !== layer || group.back !== back || group.block !== block) close(), (group = { layer, back, block });
      else state.freed = null;
      state.kv[layer][column] = 1;
      if (pass === "forward") {
        if (block === last) keeps = true;
        if (layer === 0 && this.lowest === 0 && keeps) state.input[0][column] = 1;
        if (layer + 1 < L && layer + 1 >= this.lowest && keeps) state.input[layer + 1][column] = 1;
        if (this.keeps[layer] && layer >= this.lowest && keeps) state.kept[layer][column] = 1;
      }
      if (pass === "backward") {
        for (let c = 0; c < column; ++c) state.dkv[layer][c] ||= 1;
        state.dkv[layer][column] = 2;
      }
    }
    return state;
  }
}

const walks = (data.walks ?? []).map((walk, i) => new Walk(walk, i));
const now = { walk: walks.find((w) => w.selected) ?? walks[0], seconds: 0, playing: false, speed: 1 };

// --- The parts of the page ---

const longest = Math.max(...walks.map((w) => w.duration)), second = [...walks].map((w) => w.peak).sort((a, b) => a - b);
const ceiling = Math.min(1.08 * second[second.length - 1], 1.5 * second[Math.max(0, second.length - 2)]);  // full memory may leave the picture

const charts = walks.map((walk) => {
  const chart = new Chart({
    title: walk.name, height: 190,
    label: `${walk.name}: memory over the step, at most ${format.bytes(walk.peak)}, ${format.seconds(walk.duration)}`,
    x: { low: 0, high: longest, format: (x) => `${Number(x.toPrecision(3))}`, label: "predicted seconds" },
    y: { low: 0, high: ceiling, format: format.bytes, unit: unitOf(ceiling) },
    choose: (x) => go(Math.min(x, walk.duration - 1e-9), walk),
    paint(chart, context) {
      const fill = kinds.map(([name, c]) => [data.kinds.indexOf(name), colour(c)]);
      let cell = 0;
      for (let px = Math.floor(chart.left); px < chart.left + chart.width; ++px) {
        const until = chart.inverse(px + 1);
        let highest = cell;
        while (cell + 1 < walk.size && walk.time[cell + 1] < until)
          if (walk.total[++cell] > walk.total[highest]) highest = cell;
        if (chart.inverse(px) > walk.duration) break;
        let sum = 0;
        const bytes = walk.bytes(highest);
        for (const [kind, style] of fill) {
          if (!bytes[kind]) continue;
          context.fillStyle = style;
          context.fillRect(px, chart.py(sum + bytes[kind]), 1, chart.py(sum) - chart.py(sum + bytes[kind]));
          sum += bytes[kind];
        }
      }
      context.fillStyle = colour("ink"), context.textAlign = "left", context.font = "600 12px system-ui";
      const outside = walk.peak > ceiling, peak = format.bytes(walk.peak) + (outside ? " ↑" : "");
      const at = chart.px(walk.time[walk.total.indexOf(walk.peak)]);
      const x = Math.min(at + 4, chart.left + chart.width - context.measureText(peak).width - 2);
      if (outside) context.fillStyle = colour("paper");
      context.fillText(peak, x, outside ? 14 : Math.max(8, chart.py(walk.peak) - 9));
      if (data.memory) {
        context.fillStyle = colour("ink"), context.globalAlpha = 0.6;
        for (let x = chart.left; x < chart.left + chart.width; x += 7) context.fillRect(x, chart.py(data.memory), 4, 1);
        context.globalAlpha = 1;
      }
    },
  });
  chart.output.textContent = walk.what;
  return chart;
});

const grid = new Picture(30 + Math.min(560, Math.max(180, 14 * (data.layers + 1))), "The model as a grid of layers by chunks", (context, width, height) => {
  const { walk } = now, { cell, operation } = walk.at(now.seconds), state = walk.lives(cell), L = data.layers;
  const left = 62, w = (width - left - 2) / walk.columns, h = (height - 30) / (L + 1), gap = Math.min(1, w / 5, h / 5);
  const x = (column) => left + column * w, y = (layer) => (L - layer) * h;
  const box = (layer, column, name, from, to, alpha = 1) => {
    context.globalAlpha = alpha, context.fillStyle = colour(name);
    context.fillRect(x(column) + gap, y(layer) + gap + from * (h - 2 * gap), Math.max(w - 2 * gap, 0.5), (to - from) * (h - 2 * gap));
    context.globalAlpha = 1;
  };
  context.textBaseline = "middle", context.textAlign = "right", context.fillStyle = colour("soft");
  context.fillText("head", left - 6, y(L) + h / 2);
  for (let layer = 0; layer < L; ++layer)
    if (layer % Math.ceil(14 / h) === 0) context.fillText(`layer ${layer}`, left - 6, y(layer) + h / 2);
  for (let layer = 0; layer < L; ++layer)
    for (let column = 0; column < walk.columns; ++column) {
      box(layer, column, "raised", 0, 1);
      if (state.input[layer][column]) box(layer, column, "blue", 0, 1, walk.far_inputs ? 0.25 : 0.55);
      if (state.kept[layer][column]) box(layer, column, "violet", 0, 0.35);
      if (state.kv[layer][column]) box(layer, column, "teal", 0.62, 1);
      if (state.dkv[layer][column]) box(layer, column, "amber", 0.35, 0.66, state.dkv[layer][column] === 2 ? 1 : 0.45);
    }
  const layer = walk.layer[cell];
  context.lineWidth = 1.5;
  if (state.freed) {
    context.setLineDash([3, 3]), context.strokeStyle = colour("soft");
    context.strokeRect(x(state.freed.from), y(state.freed.layer) + 1, (state.freed.to - state.freed.from) * w, h - 2);
    context.setLineDash([]);
  }
  if (layer < 0) return;
  const part = walk.part(cell, operation), [name] = passes[part];
  const [from, to] = [walk.begin[cell] / walk.chunk, walk.end[cell] / walk.chunk], middle = y(layer) + h / 2;
  context.fillStyle = context.strokeStyle = colour(name);
  context.fillRect(x(from), y(layer), Math.max((to - from) * w, 2), h);
  if (layer === L || part === "keys and values") return;
  // Attention reads K and V of earlier rows; backward adds to their dK and dV.
  const reach = data.window > 0 && data.local[layer] ? Math.max(0, walk.begin[cell] - data.window) / walk.chunk : 0;
  if (x(from) - x(reach) < 14) return;
  const toLeft = part === "backward", [tip, tail] = toLeft ? [x(reach), x(from)] : [x(from), x(reach)], d = toLeft ? 1 : -1;
  context.beginPath(), context.moveTo(tail, middle), context.lineTo(tip + d, middle), context.stroke();
  context.beginPath(), context.moveTo(tip, middle), context.lineTo(tip + d * 8, middle - 4), context.lineTo(tip + d * 8, middle + 4), context.fill();
  context.fillStyle = colour("ink"), context.textAlign = "center";
  context.fillText(toLeft ? "dK, dV" : "K, V", (tip + tail) / 2, y(layer) + (layer === L - 1 ? h + 8 : -7));
});

const source = (data.source ?? "").split("\n");
const lineOf = (snippet) => source.findIndex((text) => text.includes(snippet));

function describe(walk, cell, part, operation) {
  const { name } = operation, rows = `rows ${format.whole(walk.begin[cell])} to ${format.whole(walk.end[cell])}`;
  if (walk.layer[cell] >= 0) return `${walk.layer[cell] === data.layers ? "" : `Layer ${walk.layer[cell]}: `}${passes[part][2]}, ${rows}`;
  if (/adamw|momentum|direction|share weights|gradient norm/.test(name)) return "The optimizer's update";
  return name.startsWith("embedding") ? "The embedding" : "Between two passes: gradient sums begin or end";
}

const code = element("pre", { tabindex: "0", "aria-label": "the lines of streambp.cuh that run" }), what = element("h3"), formula = element("p"), numbers = element("div");
const slider = element("input", { type: "range", min: 0, max: 100000, "aria-label": "time in the step", oninput: () => go((slider.value / 100000) * now.walk.duration) });
const live = element("p", { class: "soft", "aria-live": "polite" });

// The numbers at the cursor.
function numbersAt(walk, seconds) {
  const { cell, operation, from } = walk.at(seconds), { all } = walk.list[cell], op = all[operation];
  const before = (what, so) => walk[so][cell] + all.slice(0, operation).reduce((s, o) => s + o[what], 0);
  return { cell, operation, from, op, part: walk.part(cell, operation), bytes: walk.bytes(cell, op), flops: before("flops", "work"),
    sent: before("sent", "wire"), copied: before("copied", "far") };
}

function show() {
  const { walk } = now, at = numbersAt(walk, now.seconds), { op } = at;
  what.textContent = describe(walk, at.cell, at.part, op);
  formula.replaceChildren(element("b", {}, op.name), `  ${formulas[op.name] ?? ""}`, element("br"),
    element("span", { class: "soft" }, `${format.count(op.flops)}FLOP, ${format.seconds(op.seconds)}` + (op.sent ? `, sends ${format.bytes(op.sent)}` : "") + (op.copied ? `, copies ${format.bytes(op.copied)} from or to far memory` : "")));
  const snippet = passes[at.part]?.[1] ?? (op.name === "embedding" ? "embed(dev, c, x" : op.name === "embedding dw" ? "embedding_gradient(sums, s" : null);
  const running = snippet ? lineOf(snippet) : -1;
  const lines = source.slice(running - 5, running + 4), indent = Math.min(...lines.filter((text) => text).map((text) => text.search(/\S/)));
  code.replaceChildren(...(running < 0 ? ["(memory/sums.h, memory/weights.h or training/optimizer.h)"]
    : lines.map((text, i) => element(i === 5 ? "mark" : "span", {}, `${String(running - 4 + i).padStart(3)}  ${text.slice(indent)}\n`))));
  const total = at.bytes.reduce((a, b) => a + b);
  const rows = kinds.filter(([name]) => walk.memory[data.kinds.indexOf(name)].some((x) => x > 0) || at.bytes[data.kinds.indexOf(name)] > 0).reverse();
  const fill = table([], [
    ...rows.map(([name, c]) => [key(c, kindNames[name] ?? name), format.bytes(at.bytes[data.kinds.indexOf(name)])]),
    [element("b", {}, "memory in use"), format.bytes(total)],
    ["work so far", `${format.count(at.flops)}FLOP of ${format.count(walk.work[walk.size])}FLOP`],
    ["predicted time so far", `${format.seconds(now.seconds)} of ${format.seconds(walk.duration)}`],
    ...(data.ranks > 1 ? [["sent to other ranks so far", format.bytes(at.sent)]] : []),
    ...(walk.far[walk.size] > 0 ? [["copied to and from far memory so far", format.bytes(at.copied)]] : []),
  ]);
  numbers.replaceChildren(fill);
  slider.value = Math.round((100000 * now.seconds) / walk.duration);
  slider.setAttribute("aria-valuetext", `${what.textContent}, ${format.bytes(total)}`);
  if (!now.playing) live.textContent = `${what.textContent}: ${op.name}. ${format.bytes(total)} in use.`;
  for (const chart of charts) chart.cursor = now.seconds, chart.picture.redraw();
  grid.redraw();
  choices.forEach((button, i) => button.setAttribute("aria-pressed", walk.number === i));
}

function go(seconds, walk = now.walk) {
  now.walk = walk;
  now.seconds = Math.min(Math.max(seconds, 0), walk.duration - 1e-9);
  show();
}

// Moves by whole operations or cells.
function step(cells, operations) {
  const { walk } = now, at = walk.at(now.seconds);
  play(false);
  if (cells) return go(walk.time[Math.min(Math.max(at.cell + cells, 0), walk.size - 1)] + 1e-12);
  const { all } = walk.list[at.cell], next = at.operation + operations;
  if (next >= all.length) return step(1, 0);
  if (next >= 0) return go(walk.time[at.cell] + all.slice(0, next).reduce((s, o) => s + o.seconds, 0) + 1e-12);
  if (at.cell > 0) go(walk.time[at.cell] - walk.list[at.cell - 1].all.at(-1).seconds / 2);
}

const playButton = element("button", { onclick: () => play(!now.playing) }, "Play");
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

const choices = walks.map((walk) => element("button", { onclick: () => go(Math.min(now.seconds / now.walk.duration, 1) * walk.duration, walk) }, walk.name));
const speed = element("select", { "aria-label": "speed", onchange: () => (now.speed = Number(speed.value)) },
  [["0.1", "slow"], ["1", "a minute"], ["4", "fast"]].map(([value, text]) => element("option", { value, selected: value === "1" }, text)));

// The charts, and the player below them.
function player() {
  return [
    element("h2", {}, "Memory over the step"),
    element("p", { class: "soft" }, kinds.filter(([name]) => !["token stream", "float32 gradient sums"].includes(name)).map(([name, c]) => key(c, kindNames[name] ?? name)), data.memory ? `dashed: ${format.bytes(data.memory)}` : ""),
    element("div", { class: "panels" }, charts.map((chart) => chart.figure)),
    table(["", "peak", "predicted time", "work", "chunk", "keeps beside layer inputs"], walks.map((w) => [w.name, format.bytes(w.peak), format.seconds(w.duration), `${format.count(w.work[w.size])}FLOP`, w.columns === 1 ? "all rows" : `${format.whole(w.chunk)} rows`, w.kept])),
    element("h2", {}, "The step, played"),
    element("div", { class: "sticky" },
      element("div", { class: "controls", role: "group", "aria-label": "which way" }, choices),
      element("div", { class: "controls" }, playButton, element("button", { onclick: () => step(-1, 0) }, "◀ cell"), element("button", { onclick: () => step(0, -1) }, "◀ operation"),
        element("button", { onclick: () => step(0, 1) }, "operation ▶"), element("button", { onclick: () => step(1, 0) }, "cell ▶"), speed, slider)),
    element("div", { class: "beside" },
      element("figure", {}, grid.canvas, element("figcaption", {},
        key("blue", "layer input kept"), key("violet", "more kept"), key("teal", "K, V"), key("amber", "dK, dV: pale until all later rows have added"), "dashed: just freed. ",
        "Columns are chunks of rows, the first row at the left. Solid: what is computed now, ", key("green", "forward"), key("violet", "recomputed"), key("red", "backward"))),
      element("div", {}, what, formula, code, numbers)),
    live];
}

if (walks.length > 0 && data.title) {
  page(data.title, [
    `${data.model}. One training step on ${format.whole(data.length)} tokens, ${data.dtype}, optimizer ${data.optimizer}, recorded from the program's own walk, which runs on a device that only counts. All ways below compute the same gradient, bit for bit; they differ in what lives when.`,
    "A step goes up through the layers (forward), then down (backward). Backward needs the activations of forward: full memory keeps them, checkpointing computes a whole layer again, and StreamBP computes one chunk of a layer again, the last chunk first, because only later rows add to the dK and dV of a row.",
  ],
    player(),
    element("p", { class: "soft" }, "Made by ", element("code", {}, data.command), data.micro_batches > 2 ? `. Of ${data.micro_batches} micro-batches the first two are shown; the others are like the second.` : "."));
  const [number, share] = location.hash.slice(1).split(":").map(Number);  // page.html#2:0.6
  const walk = (location.hash && walks[number]) || now.walk;
  go((share || 0) * walk.duration, walk);
}
