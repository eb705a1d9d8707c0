// `verify --html`: what was verified, the verdict, and a map of the parameters coloured by their distance from the
// exact gradient.
"use strict";

// model.layers.12.self_attn.q_proj.weight -> [12, "self_attn.q_proj.weight"]; outside of layers -> [null, name]
function placeOf({ tensor }) {
  const parts = tensor.match(/^(.*?)\.(\d+)\.(.+)$/);
  return parts ? [Number(parts[2]), parts[3]] : [null, tensor];
}
function wordsOf({ tensor, distance, cosine, norm_ratio, right }) {
  const parts = [`${tensor}: distance ${distance === null ? "infinite" : distance.toExponential(2)}`];
  if (cosine !== undefined) parts.push(`cosine ${format.number(cosine)}`, `norm ratio ${format.number(norm_ratio)}`);
  if (right === false) parts.push("WRONG");
  return parts.join(", ");
}

// From the smallest distance, green, to the largest, amber, in the logarithm; red where the tensor is wrong.
function scaleOf(tensors, limit) {
  const wrong = (t) => t.right === false || t.distance === null || t.distance > limit;
  const logs = tensors.filter((t) => !wrong(t) && t.distance > 0).map((t) => Math.log10(t.distance));
  const low = Math.min(...logs), high = Math.max(...logs);
  const amber = ({ distance }) =>
    (distance > 0 && high > low ? Math.round((100 * (Math.log10(distance) - low)) / (high - low)) : 0);
  const shade = (t) => (wrong(t) ? "var(--red)" : `color-mix(in oklab, var(--amber) ${amber(t)}%, var(--green))`);
  const power = (log) => (10 ** log).toExponential(0);
  const right = logs.length ? `Green: ${power(low)} or less; amber: ${power(high)}; red: ` : "Red: ";
  const judged = tensors.some((t) => t.right !== undefined);
  return { shade, legend: right + (judged ? "more than rounding explains." : `more than ${limit.toExponential(0)}.`) };
}
function mapOf(tensors, limit) {
  const said = output("Point at a square, or go there with Tab and the arrow keys, to read it.");
  const { shade, legend } = scaleOf(tensors, limit);
  const square = (t) => {
    const words = wordsOf(t), result = field(() => (said.textContent = words), { "aria-label": words });
    result.style.background = shade(t);
    return result;
  };
  const squares = new Map(), layers = new Set(), kinds = new Set(), others = [];
  for (const t of tensors) {
    const [layer, kind] = placeOf(t);
    if (layer === null) others.push(span("key", square(t), t.tensor));
    else layers.add(layer), kinds.add(kind), squares.set(`${layer} ${kind}`, square(t));
  }
  const titles = [...kinds].map((kind) => element("th", {}, element("span", {}, kind.replace(/\.weight$/, ""))));
  const lines = [...layers].sort((a, b) => b - a).map((layer) => {
    const line = [...kinds].map((kind) => element("td", {}, squares.get(`${layer} ${kind}`) ?? []));
    return element("tr", {}, element("th", {}, `${layer}`), line);
  });
  const head = element("thead", {}, element("tr", {}, element("th", {}, "layer"), titles));
  const map = element("table", { class: "map" }, head, element("tbody", {}, lines));
  return oneTabStop(element("figure", {}, said, div("wide", map), paragraph(others), caption(legend)));
}

const verdicts = {  // if it holds, and if not
  verified: ["Verified: every bit of the gradient is the same in all modes.", "Not verified."],
  holds: ["Every line of the certificate holds.", "A line of the certificate does not hold."],
  verdict: ["Right: rounding explains every difference.", "Wrong: rounding does not explain the differences."],
};
function verdict() {
  const name = Object.keys(verdicts).find((name) => name in data);
  if (!name) return [];
  const [good, notGood] = verdicts[name], holds = name === "verdict" ? data.verdict === "right" : data[name];
  return element("p", { class: holds ? "good" : "bad" }, holds ? good : notGood);
}
function summary() {
  const { fingerprint, oracle, loss } = data;
  const rows = [["model", data.what], ["command", monospace(data.command)]];
  if (fingerprint) rows.push(["fingerprint of the gradient", monospace(fingerprint)]);
  const error = oracle && `${oracle.error.toExponential(1)}, largest in ${oracle.tensor}`;
  if (oracle) rows.push(["distance from the independent oracle", error]);
  if (loss !== undefined) rows.push(["loss", `${loss}`]);
  return table([], [...rows, ["made", data.date]]);
}

function certificate(lines) {
  const rows = lines.map(({ name, what, holds, result, seconds, command }) => {
    const mark = holds === null ? "soft" : holds ? "good" : "bad";
    return [name, what, span(mark, result), seconds.toFixed(2), monospace(command)];
  });
  return [heading("Certificate"), table(["", "what is compared", "result", "seconds", "repeat it"], rows)];
}
function modes(runs) {
  const titles = ["mode", "chunk", "loss", "memory", "seconds", "distance from float64", "largest in", "bits"];
  const rows = runs.map((run) => [run.mode, format.whole(run.chunk), run.loss.toFixed(12), format.bytes(run.peak),
    run.seconds.toFixed(2), run.error.toExponential(1), run.tensor, run.bits_equal ? "equal" : span("bad", "DIFFER")]);
  return [heading("Modes"), table(titles, rows)];
}
function effect(sections) {
  const rows = sections.map(({ section, distance, cosine, norm_ratio }) =>
    [section, format.percent(distance), cosine.toFixed(6), format.number(norm_ratio)]);
  return [heading("What the defect does to the gradient"), table(["", "distance", "cosine", "norm ratio"], rows)];
}
function parameters(tensors) {
  const good = tensors.filter((t) => t.right !== false).map((t) => t.distance);
  const limit = data.rounding_limit ?? Math.max(1e-10, ...good);
  return [heading("Every parameter: distance from the exact gradient"), mapOf(tensors, limit)];
}

if (data.what) {
  const said = (data.said ?? []).map((text) => paragraph(text));
  page(data.title, verdict(), (data.problems ?? []).map(bad), said, summary(),
    data.certificate ? certificate(data.certificate) : [],
    data.runs?.length ? modes(data.runs) : [],
    data.effect ? effect(data.effect) : [],
    data.tensors?.length ? parameters(data.tensors) : []);
}
