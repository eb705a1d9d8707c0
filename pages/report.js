// `train` and `report`: the curves of runs, what they are, and what they have written.
"use strict";

const runs = data.runs ?? [];
const runColours = ["blue", "red", "amber", "green", "violet", "teal", "grey3", "ink"];

// A chart's title, its metrics, and how their values are written. All other metrics get a chart each.
const groups = [
  ["Loss, nats per token", ["loss", "evaluation_loss"]],
  ["Held-out loss in each half of the documents", ["first_half", "second_half"]],
  ["Reward", ["reward", "evaluation_reward"]],
  ["Accuracy: the chosen document is preferred", ["accuracy", "evaluation_accuracy"], format.percent],
  ["Margin between chosen and rejected", ["margin", "evaluation_margin"]],
  ["Length of completions, tokens", ["length", "evaluation_length"]],
  ["Entropy, nats per token", ["entropy", "evaluation_entropy"]],
  ["KL to the reference model", ["kl", "evaluation_kl"]],
  ["Clipped ratios", ["clip_fraction"], format.percent],
  ["Gradient norm", ["gradient_norm"]],
  ["Learning rate", ["rate"]],
  ["Tokens a second", ["tokens_per_second"], format.count],
  ["Share of the matrix products' rate", ["utilisation"], format.percent],
  ["Memory", ["memory"], format.bytes],
  ["Far memory", ["far_memory"], format.bytes],
  ["Seconds of a step", ["seconds"], format.seconds],
];
const words = { evaluation_loss: "held-out", loss: "training", first_half: "first half", second_half: "second half" };
const nameOf = (metric) => words[metric] ?? (metric.startsWith("evaluation_") ? "held-out" : metric.replaceAll("_", " "));

function chartOf(title, metrics, write = format.number) {
  const series = runs.flatMap((run, i) => metrics.filter((metric) => run.series[metric]).map((metric, j) => {
    const { steps, mean, low = mean, high = mean } = run.series[metric], heldOut = metric.startsWith("evaluation_") || title.startsWith("Held-out");
    return { name: (runs.length > 1 ? `${run.name} ` : "") + nameOf(metric), colour: runColours[runs.length > 1 ? i : heldOut && j > 0 ? 1 : 0], x: steps, mean, low, high, dots: heldOut };
  }));
  if (series.length === 0 || (title === "Far memory" && series.every((s) => Math.max(...s.high) === 0))) return null;
  const values = series.flatMap((s) => s.high).sort((a, b) => a - b), last = (run) => run.begins.at(-1) ?? {};
  // A few huge values, as a gradient norm may have, would hide all others.
  const log = metrics[0] === "gradient_norm" && values[0] > 0 && values.at(-1) > 20 * values[values.length >> 1];
  const levels = runs.length > 1 ? [] : metrics[0] === "memory" ? [[last(runs[0]).planned_memory, "planned"]]
    : metrics[0] === "gradient_norm" && last(runs[0]).clip > 0 ? [[last(runs[0]).clip, "above: clipped"]] : [];
  const marks = runs.length > 1 ? [] : runs[0].begins.slice(1).map((b) => [b.step, "soft"]);
  return seriesChart({ title, series, format: write, log, marks, smoothed: !["rate", "memory", "far_memory"].includes(metrics[0]), levels: levels.filter(([y]) => y > 0), low: metrics[0] === "memory" || write === format.percent ? 0 : undefined });
}

function facts(run) {
  const begin = run.begins.at(-1), rows = [];
  if (!begin) return element("p", { class: "soft" }, "An older version of the program wrote this run; its metrics do not say how it began.");
  const say = (name, value) => value && rows.push([name, value]);
  say("model", begin.model), say("trained", begin.trained), say("data", begin.data), say("fingerprint of the data", begin.data_fingerprint);
  say("steps", `${format.whole(begin.steps)} of ${format.whole(begin.tokens)} tokens, objective ${begin.objective}`), say("learning rate", begin.rate);
  say("memory", `${format.bytes(begin.planned_memory)} planned, mode ${begin.mode}${begin.mode === "stream" ? `, chunks of ${begin.chunk} rows${begin.block ? ` in blocks of ${begin.block}` : ""}, keeps beside layer inputs: ${begin.kept}` : ""}`);
  say("machine", `${begin.machine}, matrix products at ${format.count(begin.matmul_rate)}FLOP/s${begin.ranks > 1 ? `, ${begin.ranks} ranks` : ""}`);
  say("program", begin.version);
  const first = run.fingerprints.find(([step]) => step === 1);
  say("fingerprint of the first gradient", first && element("code", {}, first[1]));
  run.begins.forEach((b) => rows.push([b.step > 0 ? `resumed after step ${format.whole(b.step)}` : "began", [element("code", {}, b.command), ` ${b.date}`]]));
  return [table([], rows),
    begin.trained ? element("details", {}, element("summary", {}, "What is trained"), table(["tensor", "layers", "numbers"],
      begin.trained_parts.map(([kind, layers, numbers]) => [kind, ranges(layers), format.whole(numbers)]))) : [],
    element("details", {}, element("summary", {}, "All options"), table([], Object.entries(begin.options).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)])))].flat();
}

// 0 1 2 5 -> "0 to 2, 5"
function ranges(numbers) {
  const parts = [];
  for (const n of [...new Set(numbers)].sort((a, b) => a - b)) parts.at(-1)?.[1] === n - 1 ? (parts.at(-1)[1] = n) : parts.push([n, n]);
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a} to ${b}`)).join(", ");
}

function state(run) {
  const steps = run.begins.at(-1)?.steps, lost = Object.entries(run.series).filter(([, s]) => s.not_finite);
  const done = steps && run.last >= steps;
  return [
    element("p", {}, done ? "Complete: " : "", `step ${format.whole(run.last)}${steps ? ` of ${format.whole(steps)}` : ""}. ${done ? "" : "It goes on, was stopped or was killed; train --resume continues it."}`),
    run.error ? element("p", { class: "bad" }, `Ended with an error: ${run.error.text}`) : [],
    lost.length ? element("p", { class: "bad" }, "Not a finite number: " + lost.map(([name, s]) => `${name.replaceAll("_", " ")} at step ${s.not_finite.slice(0, 5).map(format.whole).join(", ")}${s.not_finite.length > 5 ? " and later" : ""}`).join("; ")) : [],
    run.damaged ? element("p", { class: "bad" }, `${run.damaged} damaged line${run.damaged > 1 ? "s" : ""} in metrics.jsonl left out`) : [],
  ].flat();
}

function texts(run) {
  const read = (title, text) => [element("h3", {}, title), element("pre", { class: "text", dir: "auto", tabindex: "0" }, text)];
  return [
    run.completions.length ? element("h2", {}, "Completions") : [],
    run.completions.map((group, i) => element("details", { open: i === run.completions.length - 1 },
      element("summary", {}, `Step ${format.whole(group.step)}: rewards ${group.rewards.map(format.number).join(", ")}`),
      read("Prompt", group.prompt), (group.texts ?? []).map((text, j) => read(`Completion with reward ${format.number(group.rewards[j])}`, text)))),
    run.samples.length ? element("h2", {}, "Samples") : [],
    run.samples.map((sample) => [element("h3", {}, `After step ${format.whole(sample.step)}`), element("pre", { class: "text", dir: "auto", tabindex: "0" }, element("mark", {}, sample.prompt), sample.text)]),
  ].flat(3);
}

// How long the gradients of two runs have the same bits.
function sameBits(a, b) {
  const pairs = a.fingerprints.flatMap(([step, , all]) => b.fingerprints.filter((f) => f[0] === step).map((f) => [step, f[2] === all]));
  if (pairs.length === 0) return "their metrics have no fingerprints of the same steps";
  const first = pairs.find(([, same]) => !same), equal = pairs.filter(([, same]) => same).at(-1);
  if (!first) return `the same bits in all steps up to ${format.whole(equal[0])}, as far as both have recorded them`;
  return equal ? `the same bits up to step ${format.whole(equal[0])}, others at step ${format.whole(first[0])} at the latest` : `other bits from step ${format.whole(first[0])} on`;
}

if (runs.length > 0) {
  const known = new Set(groups.flatMap(([, metrics]) => metrics));
  const others = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].filter((metric) => !known.has(metric));
  const charts = [...groups, ...others.map((metric) => [metric.replaceAll("_", " "), [metric]])].map((group) => chartOf(...group)).filter((chart) => chart);
  const summary = runs.length === 1 ? state(runs[0]) : [
    table(["run", "steps", "last loss", "lowest held-out loss", "memory", "gradients beside the first run's"], runs.map((run, i) => {
      const s = run.series, lowest = (metric) => (s[metric] ? format.number(Math.min(...(s[metric].low ?? s[metric].mean))) : "");
      return [key(runColours[i], run.name), format.whole(run.last), s.loss ? format.number(s.loss.mean.at(-1)) : "", lowest("evaluation_loss"), s.memory ? format.bytes(Math.max(...(s.memory.high ?? s.memory.mean))) : "", i === 0 ? "" : sameBits(runs[0], run)];
    })),
    ...runs.flatMap((run) => (run.error || run.damaged ? [element("h3", {}, run.name), ...state(run)] : []))];
  page(data.title, [], ...summary, element("h2", {}, "Curves"),
    element("p", { class: "soft" }, "Pale: the values, where there are many; a band is their range in neighbouring steps, so no peak is hidden. Strong: smoothed. Point at a curve, or focus it and press the arrow keys, to read it."),
    element("div", { class: "panels" }, charts),
    ...runs.flatMap((run) => [element("h2", {}, runs.length > 1 ? `The run ${run.name}` : "The run"), ...facts(run)]),
    ...(runs.length === 1 ? texts(runs[0]) : []));
}
