// The pictures of docs/lesson.html. Its played step is that of pages/step.js; its memory comes from the formulas below,
// which a test compares with `plan`.
"use strict";

const put = (id, ...parts) => document.getElementById(id).append(...parts.flat(Infinity));
const count = (n, value) => Array.from({ length: n }, (_, i) => value(i));

// --- Memory of a step in float32, of a model with these sizes, in bytes by kind at its peak ---

// heads of 64 numbers; four query heads share K and V; the MLP is 2.75 times as wide as the model.
function sizes({ heads }) {
  const d = 64 * heads, kv = 64 * Math.ceil(heads / 4), mlp = 176 * heads;
  return { d, kv, mlp, layer: 2 * d * d + 2 * d * kv + 3 * d * mlp + 2 * d };
}
// What backward needs of a layer, for each token: two normed inputs, q, attention's output, the middle, gate, up and
// their product, and a number for each head. Backward itself needs the gradients of two of them at a time.
function activations(s) {
  const { d, mlp } = sizes(s);
  return { kept: 5 * d + 3 * mlp + s.heads, backward: mlp + d };
}
// Logits of so many rows take about the memory of a chunk's activations.
function headChunk(s) {
  const { d, mlp } = sizes(s), rows = (s.chunk * (9 * d + 4 * mlp)) / s.vocab;
  return Math.min(s.chunk, Math.max(256 * Math.floor(rows / 256), 256));
}

const lessonKinds = [["weights", "grey1"], ["gradient", "grey3"], ["layer inputs", "blue"],
  ["kept activations", "violet"], ["K, V, dK, dV", "teal"], ["activations", "red"], ["logits", "amber"]];
function peak(mode, s) {
  const { length: N, layers: L, vocab: V } = s, { d, kv, layer } = sizes(s), a = activations(s), full = mode === "full";
  const C = mode === "stream" ? Math.min(s.chunk, N) : N, H = mode === "stream" ? Math.min(headChunk(s), N) : N;
  const weights = 2 * V * d + L * layer + d, kept = full ? N * a.kept : 0, pair = 2 * N * kv;
  const again = C * ((full ? 0 : a.kept) + a.backward);
  // While backward is in a layer, the inputs of the layers below it live, and the gradients of those above it.
  const inLayer = (l) =>
    [weights, V * d + (L - l) * layer, (l + 2) * N * d, (l + 1) * kept, full ? (l + 2) * pair : 2 * pair, again, 0];
  const moments = [
    [weights, V * d, (L + 1) * N * d, L * kept, full ? L * pair : 0, 2 * H * d, H * V],  // the head
    inLayer(L - 1), inLayer(0),
    [weights, 2 * V * d + L * layer, N * d, 0, 0, 0, 0],  // the embedding
  ];
  return largest(moments, (numbers) => sum(numbers)).map((numbers) => 4 * numbers);
}

// A slider that sets one of the settings.
function setting(settings, name, label, choices, changed) {
  const shown = element("b"), range = element("input", {
    type: "range", min: 0, max: choices.length - 1, value: choices.indexOf(settings[name]), "aria-label": label,
    oninput: () => (update(), changed()),
  });
  function update() {
    settings[name] = choices[range.value], shown.textContent = format.whole(settings[name]);
    range.setAttribute("aria-valuetext", shown.textContent);
  }
  update();
  return element("label", { class: "controls" }, label, range, shown);
}
function memoryBar(name, bytes, longest) {
  const words = lessonKinds.map(([kind], i) => `${kind} ${format.bytes(bytes[i])}`).join(", ");
  const bar = element("div", { class: "bar", role: "img", "aria-label": `${name}: ${words}` });
  lessonKinds.forEach(([kind, colour], i) => {
    const part = element("i", { title: `${kind}: ${format.bytes(bytes[i])}` });
    part.style.width = `${(100 * bytes[i]) / longest}%`, part.style.background = `var(--${colour})`;
    bar.append(part);
  });
  return element("div", {}, subheading(`${name}: ${format.bytes(sum(bytes))}`), bar);
}
function memory() {
  const settings = { length: 16384, layers: 12, heads: 12, chunk: 512, vocab: 32000 };
  const bars = element("div"), said = element("p", { "aria-live": "polite" });
  function show() {
    const bytes = ["full", "checkpoint", "stream"].map((mode) => peak(mode, settings));
    const totals = bytes.map((b) => sum(b)), [full, checkpoint, stream] = totals, most = Math.max(...bytes[2]);
    bars.replaceChildren(...["Full memory", "Checkpointing", "StreamBP"].map((name, i) =>
      memoryBar(name, bytes[i], Math.max(...totals))));
    said.textContent = `StreamBP needs ${format.percent(stream / checkpoint)} of checkpointing's memory, and ` +
      `${format.percent(stream / full)} of full memory. Most of it, ${format.bytes(most)}, is for ` +
      `${lessonKinds[bytes[2].indexOf(most)][0]}.`;
  }
  const slide = (...given) => setting(settings, ...given, show);
  const sliders = [
    slide("length", "length, tokens", count(11, (i) => 1024 * 2 ** i)),
    slide("layers", "layers", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]),
    slide("heads", "query heads (the width is 64 times as much)", [4, 8, 12, 16, 24, 32, 48, 64]),
    slide("chunk", "chunk, rows", [256, 512, 1024, 2048, 4096, 8192]),
    slide("vocab", "vocabulary", [256, 8192, 32000, 64000, 128256, 151936, 256000]),
  ];
  show();
  return [soft(lessonKinds.map(([kind, colour]) => key(colour, kind))), bars, said, sliders];
}

const rows = 12, rowsInChunk = 3;
function attention() {
  const said = output("Point at a row or a column, or go there with Tab and the arrow keys.");
  const mark = (chosen, text) => {
    cells.forEach((line, i) => line.forEach((cell, j) => cell.classList.toggle("chosen", j <= i && chosen(i, j))));
    said.textContent = text;
  };
  const title = (number, ...told) => element("th", {}, field(() => mark(...told), {}, `${number}`));
  const to = (a, b) => (a === b ? `row ${a}` : `rows ${a} to ${b}`);
  const column = (j) => title(j, (_, other) => other === j, `Column ${j}: ${to(j, rows - 1)} attend to row ${j}, ` +
    `so each of them adds a part to dK and dV of row ${j}.`);
  const ofRow = (i) => [(other) => other === i, `Row ${i} reads K and V of ${to(0, i)}, and of no other. ` +
    "Everything else in the layer, norms, projections and MLP, it does alone."];
  const square = (i, j) => element("td", { class: j > i ? "" : "reads", onpointerenter: () => mark(...ofRow(i)) });
  const cells = count(rows, (i) => count(rows, (j) => square(i, j)));
  const map = element("table", { class: "map attention" }, element("tr", {}, element("td"), count(rows, column)),
    cells.map((line, i) => element("tr", {}, title(i, ...ofRow(i)), line)));
  const legend = caption("Rows: what a token reads. Columns: who reads a token.");
  return oneTabStop(element("figure", {}, said, div("wide", map), legend));
}

// One head of attention in plain loops, to show what goes missing. Returns dK, of contributions that `counts` allows.
function keyGradient(counts) {
  const e = 4, values = (seed) => count(rows, (t) => count(e, (j) => Math.sin(seed * (t * e + j + 1))));
  const q = values(1.3), k = values(2.1), v = values(3.7), dout = values(4.9), dk = k.map((row) => row.map(() => 0));
  const dot = (a, b) => a.reduce((s, x, j) => s + x * b[j], 0);
  for (let t = 0; t < rows; ++t) {
    const weights = k.slice(0, t + 1).map((row) => Math.exp(dot(q[t], row) / 2)), total = sum(weights);
    const p = weights.map((w) => w / total), dp = v.slice(0, t + 1).map((row) => dot(dout[t], row)), mean = dot(p, dp);
    for (let s = 0; s <= t; ++s)
      for (let j = 0; j < e && counts(t, s); ++j) dk[s][j] += (p[s] * (dp[s] - mean) * q[t][j]) / 2;
  }
  return dk;
}
// The error of dK beside its size if each chunk uses only what it has added itself.
function relativeError() {
  const chunkOf = (row) => Math.floor(row / rowsInChunk);
  const truth = keyGradient(() => true).flat(), own = keyGradient((t, s) => chunkOf(t) === chunkOf(s)).flat();
  const size = (values) => Math.sqrt(sum(values, (x) => x * x));
  return size(truth.map((x, i) => x - own[i])) / size(truth);
}
// When a chunk is computed, it adds to its own and all earlier rows; then its own dK and dV are used.
const chunks = count(rows / rowsInChunk, (i) => i);
function chunkLine(c, sequence, done) {
  const turn = (chunk) => sequence.indexOf(chunk), used = turn(c) < done, later = chunks.filter((x) => x >= c);
  const parts = later.filter((x) => turn(x) < (used ? turn(c) + 1 : done)).map((x) => `chunk ${x}`);
  const lost = later.filter((x) => turn(x) > turn(c));
  const lacks = lost.length ? span("bad", `chunk ${lost.join(", ")}`) : span("good", "nothing");
  return [`chunk ${c}`, `${c * rowsInChunk} to ${(c + 1) * rowsInChunk - 1}`,
    used ? "done" : turn(c) === done ? "next" : "waits", parts.join(", ") || "none", used ? lacks : ""];
}

function order() {
  const body = element("div"), said = element("p", { "aria-live": "polite" });
  const titles = ["chunk", "rows", "state", "parts in its dK, dV", "missing when they are used"];
  let backwards = true, done = chunks.length;
  function ending() {
    if (backwards) return "Every chunk's dK and dV were complete when they were used: the gradient is exact.";
    return "Three of four chunks used dK and dV that lacked the parts of later chunks. For this small attention, " +
      `the gradient of K is off by ${format.percent(relativeError())} of its size.`;
  }
  function show() {
    const sequence = backwards ? chunks.toReversed() : chunks;
    body.replaceChildren(table(titles, chunks.map((c) => chunkLine(c, sequence, done))));
    said.textContent = done < chunks.length ? `Next: chunk ${sequence[done]}.` : ending();
    ways.forEach((way, i) => way.setAttribute("aria-pressed", backwards === (i === 0)));
  }
  const turn = (value) => { backwards = value, done = chunks.length, show(); };
  const ways = [button("last to first", () => turn(true)), button("first to last", () => turn(false))];
  const next = button("step", () => { done = done < chunks.length ? done + 1 : 0, show(); });
  show();
  return [div("controls", ways, next), body, said];
}

// Sums in float32, by chunks and by tiles.
function bits() {
  const n = 2048, tile = 256, x = count(n, (i) => Math.fround(Math.sin(53 * i) * 10 ** (i % 5)));
  const add = (a, b) => Math.fround(a + b), part = (from, size) => x.slice(from, from + size).reduce(add, 0);
  const inChunks = (chunk) => count(n / chunk, (c) => part(c * chunk, chunk)).reduce(add, 0);
  const inTiles = (chunk) => {
    let total = 0;
    for (let c = n - chunk; c >= 0; c -= chunk)
      for (let i = c + chunk - tile; i >= c; i -= tile) total = add(total, part(i, tile));
    return total;
  };
  const line = (chunk) => [chunk === n ? "all rows" : `${format.whole(chunk)} rows`, inChunks(chunk).toPrecision(9),
    inTiles(chunk).toPrecision(9)];
  const titles = ["chunk", "chunks added as they come", "tiles of 256 rows, the last one first"];
  return table(titles, [2048, 1024, 512, 256].map(line));
}

if (document.getElementById("memory")) {
  put("memory", memory()), put("attention", attention()), put("order", order()), put("bits", bits());
  put("played", player());
  go(0.55 * now.walk.duration);
}
