// `train` and `report`: the curves of runs, what they are, and what they have written.
"use strict";

const runs = data.runs ?? [];
// A metric can have any name, also that of a member that all objects have.
const named = (members) => Object.assign(Object.create(null), members);
for (const run of runs) run.series = named(run.series);
const runColours = ["blue", "red", "amber", "green", "violet", "teal", "grey3", "ink"];

// A chart's title, its metrics, and how their values are written. All other metrics get a chart each.
const groups = [
  ["Reward", ["reward", "evaluation_reward"]],
  ["Accuracy: the chosen document is preferred", ["accuracy", "evaluation_accuracy"], format.percent],
  ["Margin between chosen and rejected", ["margin", "evaluation_margin"]],
  ["Loss", ["loss", "evaluation_loss"]],
  ["Held-out loss in each half of the documents", ["first_half", "second_half"]],
  ["Length of completions, tokens", ["length", "evaluation_length"]],
  ["Entropy, nats per token", ["entropy", "evaluation_entropy"]],
  ["KL to the reference model", ["kl", "evaluation_kl"]],
  ["Clipped ratios", ["clip_fraction"], format.percent],
  ["Balance loss: the experts of a token, if all have equal use", ["balance_loss"]],
  ["Busiest expert of all layers: rows, beside equal use", ["busiest_expert"]],
  ["Experts that no row of a step chose", ["idle_experts"], format.percent],
  ["Entropy of the use of experts, beside equal use", ["expert_entropy"], format.percent],
  ["Gradient norm", ["gradient_norm"]], ["Learning rate", ["rate"]],
  ["Tokens a second", ["tokens_per_second"], format.count],
  ["Share of the matrix products' rate", ["utilisation"], format.percent],
  ["Memory", ["memory"], format.bytes], ["Far memory", ["far_memory"], format.bytes],
  ["Seconds of a step", ["seconds"], format.seconds],
];
const titles = named({
  stopped: "Share of completions that end by themselves", reward_deviation: "Standard deviation of the rewards",
  without_advantage: "Share of groups with equal rewards", sampling_difference: "Log-probs: sampled beside recomputed",
});
const names = named(
  { evaluation_loss: "held-out", loss: "training", first_half: "first half", second_half: "second half" });
const plainName = (metric) => metric.replace(/^evaluation_/, "");
const nameOf = (metric) => names[metric] ?? (metric === plainName(metric) ? spaced(metric) : "held-out");

function seriesOf(title, metrics) {
  const one = runs.length === 1;
  return runs.flatMap((run, i) => metrics.filter((metric) => run.series[metric]).map((metric, j) => {
    const { steps, mean, low = mean, high = mean } = run.series[metric];
    const heldOut = metric.startsWith("evaluation_") || title.startsWith("Held-out");
    const name = one ? nameOf(metric) : `${run.name} ${nameOf(metric)}`;
    return { name, colour: runColours[one ? Number(heldOut && j > 0) : i], x: steps, mean, low, high, heldOut };
  }));
}
// What a metric of a single run is compared with.
function levelsOf(metric, { planned_memory, clip } = {}) {
  if (metric === "memory" && planned_memory > 0) return [[planned_memory, "planned"]];
  return metric === "gradient_norm" && clip > 0 ? [[clip, "clipped above this line"]] : [];
}
function chartOf(title, metrics, words = format.number) {
  const series = seriesOf(title, metrics), [metric] = metrics;
  const sorted = (name) => series.flatMap((s) => s[name]).sort((a, b) => a - b);
  const highs = sorted("high"), means = sorted("mean"), median = means[(means.length - 1) >> 1];
  if (series.length === 0 || (metric === "far_memory" && highs.at(-1) === 0)) return null;
  const begins = runs.length === 1 ? runs[0].begins : [];
  return seriesChart({
    title, series, words,
    // A few huge values, as a gradient norm may have, would hide all others.
    log: ["gradient_norm", "loss"].includes(metric) && sorted("low")[0] > 0 && highs.at(-1) > 20 * median,
    low: metric === "memory" || words === format.percent ? 0 : undefined,
    marks: begins.slice(1).map((begin) => begin.step),
    levels: levelsOf(metric, begins.at(-1)),
    smoothed: !["rate", "memory", "far_memory"].includes(metric),
  });
}
function curves() {
  const known = groups.flatMap(([, metrics]) => metrics);
  const all = unique(runs.flatMap((run) => Object.keys(run.series)));
  const others = unique(all.filter((metric) => !known.includes(metric)).map(plainName));
  const shown = groups.filter(([, [metric]]) => runs.length === 1 || metric !== "first_half");
  const rest = others.map((metric) => [titles[metric] ?? spaced(metric), [metric, `evaluation_${metric}`]]);
  const words = "Pale: the values, where there are many; a band is their range in neighbouring steps, so no peak is " +
    "hidden. Strong: smoothed. Point at a curve, or focus it and press the arrow keys, to read it.";
  const busy = runs.some(({ series }) => series.utilisation?.mean.some((share) => share > 1)) ?
    " A share above 100%: the machine was busy with something else when the products' rate was measured." : "";
  const charts = [...shown, ...rest].map((group) => part(() => chartOf(...group) ?? []));
  return [heading("Curves"), soft(words, busy), div("panels", charts)];
}

function memoryOf({ planned_memory, mode, chunk, block, kept }) {
  const planned = `${format.bytes(planned_memory)} planned, mode ${mode}`;
  if (mode !== "stream") return planned;
  const blocks = block ? ` in blocks of ${block}` : "";
  return `${planned}, chunks of ${chunk} rows${blocks}, keeps beside layer inputs: ${kept}`;
}
const machineOf = ({ machine, matmul_rate, ranks }) =>
  `${machine}, matrix products at ${format.flops(matmul_rate)}/s${ranks > 1 ? `, ${ranks} ranks` : ""}`;
const details = (title, open, ...parts) => element("details", { open }, element("summary", {}, title), ...parts);

function facts(run) {
  const begin = run.begins.at(-1);
  if (!begin) return soft("An older version of the program wrote this run; its metrics do not say how it began.");
  const { steps, tokens, objective, trained } = begin, first = run.fingerprints.find(([step]) => step === 1);
  const when = ({ step }) => (step > 0 ? `resumed after step ${format.whole(step)}` : "began");
  const rows = [
    ["model", begin.model], ["trained", trained],
    ["data", begin.data], ["fingerprint of the data", begin.data_fingerprint],
    ["steps", `${format.whole(steps)} of ${format.whole(tokens)} tokens, objective ${objective}`],
    ["learning rate", begin.rate], ["memory", memoryOf(begin)], ["machine", machineOf(begin)],
    ["program", begin.version], ["fingerprint of the first gradient", first && monospace(first[1])],
    ...run.begins.map((b) => [when(b), [monospace(b.command), ` ${b.date}`]]),
  ];
  const parts = () => table(["tensor", "layers", "numbers"],
    (begin.trained_parts ?? []).map(([kind, layers, count]) => [kind, ranges(layers), format.whole(count)]));
  const words = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const options = Object.entries(begin.options ?? {}).map(([name, value]) => [name, words(value)]);
  return [table([], rows.filter(([, value]) => value)),
    trained ? details("What is trained", false, part(parts)) : [],
    details("All options", false, table([], options))];
}
// 0 1 2 5 -> "0 to 2, 5"
function ranges(numbers) {
  const parts = [];
  for (const n of unique(numbers).sort((a, b) => a - b)) {
    if (parts.at(-1)?.to === n - 1) parts.at(-1).to = n;
    else parts.push({ from: n, to: n });
  }
  return parts.map(({ from, to }) => (from === to ? `${from}` : `${from} to ${to}`)).join(", ");
}

function state({ begins, last, series, error, damaged }) {
  const steps = begins.at(-1)?.steps;
  const reached = `step ${format.whole(last)}${steps ? ` of ${format.whole(steps)}` : ""}.`, done = last >= steps;
  const goesOn = steps && !done && !error ? " It goes on, was stopped or was killed; train --resume continues it." : "";
  const lost = Object.entries(series).filter(([, s]) => s.not_finite).map(([name, s]) => {
    const shown = s.not_finite.slice(0, 5).map(format.whole).join(", ");
    return `${spaced(name)} at step ${shown}${s.not_finite.length > 5 ? " and later" : ""}`;
  });
  return [paragraph(done ? `Complete: ${reached}` : `Reached ${reached}${goesOn}`),
    error ? bad(`Ended with an error: ${error.text}`) : [],
    lost.length ? bad(`Not a finite number: ${lost.join("; ")}`) : [],
    damaged ? bad(`${damaged} damaged line${damaged > 1 ? "s" : ""} in metrics.jsonl left out`) : []];
}
const text = (...parts) => element("pre", { class: "text", dir: "auto", tabindex: "0" }, ...parts);
function completion({ step, prompt, texts, rewards }, open) {
  const title = `Step ${format.whole(step)}: rewards ${rewards.map(format.number).join(", ")}`;
  const head = (i) => subheading(`Completion with reward ${format.number(rewards[i])}`);
  const parts = texts?.map((answer, i) => [head(i), text(answer)]) ?? [];
  const turns = prompt.map(([role, words]) => [role ? soft(role) : [], text(words)]);
  return details(title, open, subheading("Prompt"), turns, parts);
}
function written({ completions, samples }) {
  const sample = ({ step, prompt, text: rest }) =>
    [subheading(`After step ${format.whole(step)}`), text(element("mark", {}, prompt), rest)];
  return [completions.length ? heading("Completions") : [],
    completions.map((group, i) => part(() => completion(group, i === completions.length - 1))),
    samples.length ? [heading("Samples"), samples.map(sample)] : []];
}

// A line for each layer, a square for each expert: white has no rows, the full colour twice those of equal use or more.
function experts({ expert_load: load }) {
  if (!load) return [];
  const size = Math.max(4, Math.min(16, 320 / load.length));
  const picture = new Picture(size * load.length, "Use of the experts of each layer", (context, width) => {
    load.forEach((line, l) => line.forEach((share, e) => {
      context.globalAlpha = Math.min(1, share / 2);
      fill(context, "blue", (e * width) / line.length, l * size, width / line.length - 0.5, size - 0.5);
    }));
  });
  const [least, most] = [Math.min, Math.max].map((of) => format.number(of(...load.flat())));
  return [heading("Experts"), soft("Rows of each expert (columns) in each layer (lines) since the evaluation before, beside ",
    `equal use: from ${least} to ${most}. The full colour is 2 or more, none is 0.`), element("figure", {}, picture.canvas)];
}

// How long the gradients of two runs have the same fingerprints. A fingerprint is [step, of this step, of all steps from
// the first one without a gap, this first step].
function compared(a, b) {
  const pairs = a.fingerprints.flatMap(([step, , all, first]) =>
    b.fingerprints.filter((other) => other[0] === step && other[3] === first)
      .map((other) => ({ step, same: other[2] === all })));
  if (pairs.length === 0) return "they have no fingerprints of the same steps";
  const words = (pair) => format.whole(pair.step);
  const first = pairs.find((pair) => !pair.same), equal = pairs.findLast((pair) => pair.same);
  if (!first) return `the same fingerprints up to step ${words(equal)}`;
  if (!equal) return `others from step ${words(first)} on`;
  return `the same fingerprints up to step ${words(equal)}, others at step ${words(first)} at the latest`;
}
function comparison() {
  const titles = ["run", "steps", "last loss", "lowest held-out loss", "memory", "gradients beside the first run's"];
  const rows = runs.map((run, i) => {
    const { loss, evaluation_loss: heldOut, memory } = run.series;
    return [key(runColours[i], run.name), format.whole(run.last), loss ? format.number(loss.mean.at(-1)) : "",
      heldOut?.mean.length ? format.number(Math.min(...(heldOut.low ?? heldOut.mean))) : "",
      memory ? format.bytes(Math.max(...(memory.high ?? memory.mean))) : "", i === 0 ? "" : compared(runs[0], run)];
  });
  const troubled = runs.filter((run) => run.error || run.damaged);
  return [table(titles, rows), troubled.map((run) => [subheading(run.name), state(run)])];
}

if (runs.length > 0) {
  const one = runs.length === 1, title = (run) => heading(one ? "The run" : `The run “${run.name}”`);
  page(data.title, part(() => (one ? state(runs[0]) : comparison())), part(curves),
    runs.map((run) => [title(run), part(() => facts(run))]), one ? [part(() => experts(runs[0])), part(() => written(runs[0]))] : []);
}
