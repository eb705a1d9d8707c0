// `verify --html`: what was verified, the verdict, and a map of the parameters coloured by their distance from the exact
// gradient.
"use strict";

// model.layers.12.self_attn.q_proj.weight -> [12, "self_attn.q_proj.weight"]; outside of layers -> [null, name]
function placeOf(tensor) {
  const parts = tensor.match(/^(.*?)\.(\d+)\.(.+)$/);
  return parts ? [Number(parts[2]), parts[3]] : [null, tensor];
}


function mapOf(tensors, limit) {
  const output = element("output", { "aria-live": "polite" }, "Point at a field, or reach it with the Tab key, to read it.");
  const inLayers = tensors.filter((t) => placeOf(t.tensor)[0] !== null), kinds = [...new Set(inLayers.map((t) => placeOf(t.tensor)[1]))];
  const layers = [...new Set(inLayers.map((t) => placeOf(t.tensor)[0]))].sort((a, b) => b - a);
  // From the smallest distance, green, to the largest, amber, in the logarithm; red where the tensor is wrong.
  const wrong = (t) => t.right === false || t.distance === null || t.distance > limit;
  const good = tensors.filter((t) => !wrong(t) && t.distance > 0).map((t) => Math.log10(t.distance)), low = Math.min(...good), high = Math.max(...good);
  const shade = (t) => (wrong(t) ? "var(--red)" : `color-mix(in oklab, var(--amber) ${t.distance > 0 && high > low ? Math.round((100 * (Math.log10(t.distance) - low)) / (high - low)) : 0}%, var(--green))`);
  const field = (t) => {
    const text = `${t.tensor}: distance ${t.distance === null ? "infinite" : t.distance.toExponential(2)}` + (t.cosine === undefined ? "" : `, cosine ${format.number(t.cosine)}, norm ratio ${format.number(t.norm_ratio)}`) + (t.right === false ? ", WRONG" : "");
    const cell = element("button", { class: "field", "aria-label": text, onpointerenter: () => (output.textContent = text), onfocus: () => (output.textContent = text) });
    cell.style.background = shade(t);
    return cell;
  };
  const find = (layer, kind) => inLayers.find((t) => placeOf(t.tensor)[0] === layer && placeOf(t.tensor)[1] === kind);
  const others = tensors.filter((t) => placeOf(t.tensor)[0] === null);
  return element("figure", {}, output, element("div", { class: "wide" }, element("table", { class: "map" },
    element("thead", {}, element("tr", {}, element("th", {}, "layer"), kinds.map((kind) => element("th", {}, element("span", {}, kind.replace(/\.weight$/, "")))))),
    element("tbody", {}, layers.map((layer) => element("tr", {}, element("th", {}, `${layer}`), kinds.map((kind) => element("td", {}, find(layer, kind) ? field(find(layer, kind)) : []))))))),
    element("p", {}, others.map((t) => element("span", { class: "key" }, field(t), t.tensor))),
    element("figcaption", {}, good.length ? `Green: ${(10 ** low).toExponential(0)} or less; amber: ${(10 ** high).toExponential(0)}; red: ` : "Red: ",
      tensors.some((t) => t.right !== undefined) ? "more than rounding explains." : `more than ${limit.toExponential(0)}.`));
}

const holds = data.verified ?? data.holds ?? (data.verdict ? data.verdict === "right" : undefined);
if (data.what) {
  const verdicts = { verified: ["Verified: every bit of the gradient is the same in all modes.", "Not verified."],
    holds: ["Every line of the certificate holds.", "A line of the certificate does not hold."],
    verdict: ["Right: rounding explains every difference.", "Wrong: rounding does not explain the differences."] };
  const kind = Object.keys(verdicts).find((name) => name in data), tensors = data.tensors ?? [];
  const explanations = [data.explanation, ...(data.explanations ?? [])].filter((e) => e);
  page(data.title, [],
    kind ? element("p", { class: holds ? "good" : "bad" }, verdicts[kind][holds ? 0 : 1]) : [],
    (data.problems ?? []).map((problem) => element("p", { class: "bad" }, problem)),
    table([], [["model", data.what], ["command", element("code", {}, data.command)],
      ...(data.fingerprint ? [["fingerprint of the gradient", element("code", {}, data.fingerprint)]] : []),
      ...(data.oracle ? [["distance from the independent oracle", `${data.oracle.error.toExponential(1)}, largest in ${data.oracle.tensor}`]] : []),
      ...(data.first ? [["first wrong tensor, in the order of backward", data.first], ["largest difference", data.worst]] : []),
      ...explanations.map((e) => ["explained by", Object.entries(e).map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "object" ? JSON.stringify(value) : value}`).join("; ")]),
      ["made", data.date]]),
    data.certificate ? [element("h2", {}, "Certificate"), table(["", "what is compared", "result", "seconds", "repeat it"], data.certificate.map((line) => [line.name, line.what,
      element("span", { class: line.holds === null ? "soft" : line.holds ? "good" : "bad" }, line.result), line.seconds.toFixed(2), element("code", {}, line.command)]))] : [],
    data.runs?.length ? [element("h2", {}, "Modes"), table(["mode", "chunk", "loss", "memory", "seconds", "distance from float64", "largest in", "bits"], data.runs.map((run) => [run.mode, format.whole(run.chunk), run.loss.toFixed(12),
      format.bytes(run.peak), run.seconds.toFixed(2), run.error.toExponential(1), run.tensor, run.bits_equal ? "equal" : element("span", { class: "bad" }, "DIFFER")]))] : [],
    tensors.length ? [element("h2", {}, "Every parameter: distance from the exact gradient"), mapOf(tensors, data.rounding_limit ?? Math.max(1e-10, ...tensors.map((t) => (t.right === false ? 0 : t.distance))))] : []);
}
