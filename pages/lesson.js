// The pictures of docs/lesson.html. Its played step is that of pages/step.js; its memory comes from the formulas below,
// which a test compares with `plan`.
"use strict";

const put = (id, ...parts) => document.getElementById(id).append(...parts.flat(3));

// --- Memory of a step in float32, of a model with these sizes, in bytes by kind at its peak ---

// heads of 64 numbers; four query heads share K and V; the MLP is 2.75 times as wide as the model.
function sizes({ heads }) {
  const d = 64 * heads, kv = 64 * Math.ceil(heads / 4), mlp = 176 * heads;
  return { d, kv, mlp, layer: 2 * d * d + 2 * d * kv + 3 * d * mlp + 2 * d };
}

// What backward needs of a layer, for each token: two normed inputs, q, attention's output, the middle, gate, up and their
// product, and a number for each head. Backward itself needs the gradients of two of them at a time.
function activations(s) {
  const { d, mlp } = sizes(s);
  return { kept: 5 * d + 3 * mlp + s.heads, backward: mlp + d };
}

// Logits of so many rows take about the memory of a chunk's activations.
function headChunk(s) {
  const { d, mlp } = sizes(s);
  return Math.min(s.chunk, Math.max(256 * Math.floor((s.chunk * (9 * d + 4 * mlp)) / s.vocab / 256), 256));
}

const lessonKinds = [["weights", "grey1"], ["gradient", "grey3"], ["layer inputs", "blue"], ["kept activations", "violet"], ["K, V, dK, dV", "teal"], ["activations", "red"], ["logits", "amber"]];

function peak(mode, s) {
  const { length: N, layers: L, vocab: V } = s, { d, kv, layer } = sizes(s), a = activations(s), full = mode === "full";
  const C = mode === "stream" ? Math.min(s.chunk, N) : N, H = mode === "stream" ? Math.min(headChunk(s), N) : N;
  const weights = 2 * V * d + L * layer + d, kept = full ? N * a.kept : 0, pair = 2 * N * kv;
  // While backward is in a layer, the inputs of the layers below it live, and the gradients of those above it.
  const inLayer = (l) => [weights, V * d + (L - l) * layer, (l + 2) * N * d, (l + 1) * kept, full ? (l + 2) * pair : 2 * pair, C * ((full ? 0 : a.kept) + a.backward), 0];
  const moments = [
    [weights, V * d, (L + 1) * N * d, L * kept, full ? L * pair : 0, 2 * H * d, H * V],  // the head
    inLayer(L - 1), inLayer(0),
    [weights, 2 * V * d + L * layer, N * d, 0, 0, 0, 0],  // the embedding
  ];
  const total = (bytes) => bytes.reduce((x, y) => x + y);
  return moments.reduce((x, y) => (total(y) > total(x) ? y : x)).map((numbers) => 4 * numbers);
}

function memory() {
  const settings = { length: 16384, layers: 12, heads: 12, chunk: 512, vocab: 32000 };
  const bars = element("div"), said = element("p", { "aria-live": "polite" });
  const slider = (name, label, choices) => {
    const shown = element("b"), range = element("input", { type: "range", min: 0, max: choices.length - 1, value: choices.indexOf(settings[name]), "aria-label": label,
      oninput: () => { settings[name] = choices[range.value], show(); } });
    return { row: element("label", { class: "controls" }, label, range, shown), update: () => { shown.textContent = format.whole(settings[name]), range.setAttribute("aria-valuetext", shown.textContent); } };
  };
  const sliders = [
    slider("length", "length, tokens", [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576]),
    slider("layers", "layers", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]),
    slider("heads", "query heads (the width is 64 times as much)", [4, 8, 12, 16, 24, 32, 48, 64]),
    slider("chunk", "chunk, rows", [256, 512, 1024, 2048, 4096, 8192]),
    slider("vocab", "vocabulary", [256, 8192, 32000, 64000, 128256, 151936, 256000]),
  ];
  function show() {
    sliders.forEach((s) => s.update());
    const modes = [["full", "Full memory"], ["checkpoint", "Checkpointing"], ["stream", "StreamBP"]].map(([mode, name]) => [name, peak(mode, settings)]);
    const total = (bytes) => bytes.reduce((x, y) => x + y), largest = Math.max(...modes.map(([, bytes]) => total(bytes)));
    bars.replaceChildren(...modes.map(([name, bytes]) => {
      const bar = element("div", { class: "bar", role: "img", "aria-label": `${name}: ${lessonKinds.map(([kind], i) => `${kind} ${format.bytes(bytes[i])}`).join(", ")}` });
      bytes.forEach((b, i) => {
        const part = element("i", { title: `${lessonKinds[i][0]}: ${format.bytes(b)}` });
        part.style.width = `${(100 * b) / largest}%`, part.style.background = `var(--${lessonKinds[i][1]})`;
        bar.append(part);
      });
      return element("div", {}, element("h3", {}, `${name}: ${format.bytes(total(bytes))}`), bar);
    }));
    const [full, checkpoint, stream] = modes.map(([, bytes]) => total(bytes)), [most, where] = modes[2][1].map((b, i) => [b, lessonKinds[i][0]]).reduce((x, y) => (y[0] > x[0] ? y : x));
    said.textContent = `StreamBP needs ${format.percent(stream / checkpoint)} of checkpointing's memory, and ${format.percent(stream / full)} of full memory. The most of it, ${format.bytes(most)}, are ${where}.`;
  }
  show();
  return [element("p", { class: "soft" }, lessonKinds.map(([name, c]) => key(c, name))), bars, said, sliders.map((s) => s.row)];
}

// --- Which rows need which ---

const rows = 12, rowsInChunk = 3;

function attention() {
  const said = element("output", { "aria-live": "polite" }, "Point at a row or a column, or reach it with the Tab key.");
  const cells = Array.from({ length: rows }, (_, i) => Array.from({ length: rows }, (_, j) => element("td", { class: j > i ? "" : "reads" })));
  const mark = (chosen, text) => {
    cells.forEach((row, i) => row.forEach((cell, j) => cell.classList.toggle("chosen", j <= i && chosen(i, j))));
    said.textContent = text;
  };
  const head = (text, act) => element("th", {}, element("button", { class: "field", onpointerenter: act, onfocus: act }, text));
  const to = (a, b) => (a === b ? `row ${a}` : `rows ${a} to ${b}`);
  return element("figure", {}, said, element("div", { class: "wide" }, element("table", { class: "map attention" },
    element("tr", {}, element("td"), cells.map((_, j) => head(`${j}`, () => mark((i, column) => column === j, `Column ${j}: ${to(j, rows - 1)} attend to row ${j}, so each of them adds a part to dK and dV of row ${j}.`)))),
    cells.map((row, i) => element("tr", {}, head(`${i}`, () => mark((r) => r === i, `Row ${i} reads K and V of ${to(0, i)}, and of no other. Everything else in the layer, norms, projections and MLP, it does alone.`)), row)))),
    element("figcaption", {}, "Rows: what a token reads. Columns: who reads a token."));
}

// One head of attention in plain loops, to show what goes missing. Returns dK, of contributions that `counts` allows.
function keyGradient(counts) {
  const e = 4, value = (seed) => Array.from({ length: rows }, (_, t) => Array.from({ length: e }, (_, j) => Math.sin(seed * (t * e + j + 1))));
  const q = value(1.3), k = value(2.1), v = value(3.7), dout = value(4.9), dot = (a, b) => a.reduce((s, x, j) => s + x * b[j], 0);
  const dk = k.map((row) => row.map(() => 0));
  for (let t = 0; t < rows; ++t) {
    const weights = k.slice(0, t + 1).map((row) => Math.exp(dot(q[t], row) / 2)), sum = weights.reduce((a, b) => a + b), p = weights.map((w) => w / sum);
    const dp = v.slice(0, t + 1).map((row) => dot(dout[t], row)), mean = dot(p, dp);
    for (let s = 0; s <= t; ++s) if (counts(t, s)) for (let j = 0; j < e; ++j) dk[s][j] += (p[s] * (dp[s] - mean) * q[t][j]) / 2;
  }
  return dk;
}

function order() {
  const chunks = rows / rowsInChunk, body = element("div"), said = element("p", { "aria-live": "polite" });
  let backwards = true, done = 0;
  const chunkOf = (row) => Math.floor(row / rowsInChunk);
  const truth = keyGradient(() => true), size = (rowsOf) => Math.sqrt(rowsOf.flat().reduce((s, x) => s + x * x, 0));
  // When a chunk is computed, it adds to its own and all earlier rows; then its own dK and dV are used.
  function show() {
    const sequence = [...Array(chunks).keys()];
    if (backwards) sequence.reverse();
    const computed = new Set(sequence.slice(0, done)), used = (c) => computed.has(c);
    const lost = keyGradient((t, s) => backwards || chunkOf(t) === chunkOf(s)), share = size(truth.map((row, i) => row.map((x, j) => x - lost[i][j]))) / size(truth);
    body.replaceChildren(table(["chunk", "rows", "state", "parts in its dK, dV", "missing when they are used"], [...Array(chunks).keys()].map((c) => {
      const later = [...Array(chunks).keys()].filter((x) => x >= c), before = later.filter((x) => sequence.indexOf(x) <= sequence.indexOf(c)), missing = later.filter((x) => !before.includes(x));
      const parts = (used(c) ? before : later).filter((x) => computed.has(x)).map((x) => `chunk ${x}`).join(", ") || "none";
      return [`chunk ${c}`, `${c * rowsInChunk} to ${(c + 1) * rowsInChunk - 1}`, used(c) ? "done" : sequence[done] === c ? "next" : "waits", parts,
        used(c) ? (missing.length ? element("span", { class: "bad" }, `chunk ${missing.join(", ")}`) : element("span", { class: "good" }, "nothing")) : ""];
    })));
    said.textContent = done < chunks ? `Next: chunk ${sequence[done]}.` : backwards ? "Every chunk's dK and dV were complete when they were used: the gradient is exact."
      : `Three of four chunks used dK and dV that lacked the parts of later chunks. For this small attention, ${format.percent(share)} of the gradient of K is wrong.`;
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", backwards === (i === 0)));
  }
  const buttons = [["last to first", true], ["first to last", false]].map(([text, value]) => element("button", { onclick: () => { backwards = value, done = chunks, show(); } }, text));
  done = chunks;
  const controls = element("div", { class: "controls" }, buttons, element("button", { onclick: () => { done = done >= chunks ? 0 : done + 1, show(); } }, "step"));
  show();
  return [controls, body, said];
}

// --- Sums in tiles ---

function bits() {
  const n = 2048, tile = 256, x = Array.from({ length: n }, (_, i) => Math.fround(Math.sin(37 * i) * 10 ** (i % 5)));
  const sum = (from, to) => x.slice(from, to).reduce((s, v) => Math.fround(s + v), 0);
  const inChunks = (chunk) => { let s = 0; for (let i = 0; i < n; i += chunk) s = Math.fround(s + sum(i, i + chunk)); return s; };
  const inTiles = (chunk) => { let s = 0; for (let c = n - chunk; c >= 0; c -= chunk) for (let i = c + chunk - tile; i >= c; i -= tile) s = Math.fround(s + sum(i, i + tile)); return s; };
  return table(["chunk", "chunks added as they come", "tiles of 256 rows, the last one first"], [2048, 1024, 512, 256].map((chunk) => [chunk === n ? "all rows" : `${format.whole(chunk)} rows`, inChunks(chunk).toPrecision(9), inTiles(chunk).toPrecision(9)]));
}

if (document.getElementById("memory")) {
  put("memory", memory()), put("attention", attention()), put("order", order()), put("bits", bits());
  put("played", player());
  go(0.55 * now.walk.duration);
}
