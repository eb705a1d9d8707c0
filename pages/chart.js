// Charts: a frame with axes, and lines with the range of the values that they stand for. A cursor follows the pointer,
// or the arrow keys.
"use strict";

class Chart {
  // x, y: {low, high, format}; x also has a label, and y may have log, and the unit of which its ticks are multiples.
  // paint(chart, context) draws between the axes. read(x) returns the words for a cursor at x. With choose(x) instead,
  // the page moves the cursor, and the words are always those of said.
  constructor({ title, height = 220, x, y, paint, read, said, label, choose, legend = [] }) {
    Object.assign(this, { x, y, paint, read, choose, cursor: null });
    this.picture = new Picture(height, label ?? title, (...given) => this.draw(...given));
    this.output = output(read ? read(null) : said);
    this.figure = element("figure", {}, subheading(title), div("", legend), this.output, this.picture.canvas);
    if (read || choose) this.listen(this.picture.canvas);
  }
  listen(canvas) {
    canvas.tabIndex = 0;
    const follow = (event) => this.move(this.inverse(event.clientX - canvas.getBoundingClientRect().left));
    canvas.addEventListener("pointermove", (event) => (!this.choose || event.buttons) && follow(event));
    canvas.addEventListener("pointerdown", follow);
    canvas.addEventListener("pointerleave", () => this.choose || this.move(null));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.move((this.cursor ?? this.x.low) + (step * (this.x.high - this.x.low)) / 100);
    });
  }
  move(x) {
    this.cursor = x === null ? null : Math.min(Math.max(x, this.x.low), this.x.high);
    if (this.choose) return this.choose(this.cursor);
    this.output.textContent = this.read(this.cursor);
    this.picture.redraw();
  }
  // From values to pixels and back.
  px(x) { return this.left + ((x - this.x.low) / (this.x.high - this.x.low || 1)) * this.width; }
  py(y) {
    const f = this.y.log ? Math.log : (v) => v;
    return this.bottom - ((f(y) - f(this.y.low)) / (f(this.y.high) - f(this.y.low) || 1)) * (this.bottom - 8);
  }
  inverse(px) { return this.x.low + ((px - this.left) / this.width) * (this.x.high - this.x.low); }

  draw(context, width, height) {
    const { y } = this, unit = y.unit ?? 1;
    const levels = y.log ? logTicks(y.low, y.high) : ticks(y.low / unit, y.high / unit, 4).map((tick) => tick * unit);
    const left = Math.max(58, ...levels.map((level) => context.measureText(y.format(level)).width + 10));
    Object.assign(this, { left, width: width - left - 24, bottom: height - 36 });
    context.textBaseline = "middle";
    this.drawAxes(context, levels);
    context.save();
    context.beginPath(), context.rect(this.left - 4, 0, this.width + 8, this.bottom + 4), context.clip();
    this.paint(this, context);
    if (this.cursor !== null) fill(context, "ink", this.px(this.cursor), 0, 1, this.bottom);
    context.restore();
  }
  drawAxes(context, levels) {
    const { x, y, left, width, bottom } = this;
    for (const level of levels) {
      fill(context, "line", left, this.py(level), width, 1);
      write(context, "soft", "right", y.format(level), left - 6, this.py(level));
    }
    for (const tick of ticks(x.low, x.high, Math.min(6, width / 80)))
      write(context, "soft", "center", x.format(tick), this.px(tick), bottom + 12);
    write(context, "soft", "right", x.label, left + width, bottom + 28);
  }
}

// About n round numbers between two.
function ticks(low, high, n) {
  const rough = (high - low) / n, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough) * power, result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; ++i) result.push(i * step);
  return result;
}
function logTicks(low, high) {
  const result = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); ++power)
    for (const m of high / low > 1000 ? [1] : [1, 2, 5]) result.push(m * 10 ** power);
  return result.filter((tick) => tick >= low && tick <= high);
}

function line(chart, context, xs, ys, stroke, width) {
  Object.assign(context, { strokeStyle: stroke, lineWidth: width, lineJoin: "round" });
  context.beginPath();
  xs.forEach((x, i) => {
    const draw = missing(ys[i - 1]) ? "moveTo" : "lineTo";
    if (!missing(ys[i])) context[draw](chart.px(x), chart.py(ys[i]));
  });
  context.stroke();
}

// The average of a point and its neighbours, with weights that fall with their distance.
function smooth(ys, reach) {
  const keep = reach / (reach + 1);
  const pass = (values) => {
    let total = 0, weight = 0;
    return values.map((y) => {
      if (!missing(y)) total = keep * total + y, weight = keep * weight + 1;
      return weight > 0 ? total / weight : null;
    });
  };
  const forward = pass(ys), backward = pass(ys.toReversed()).reverse();
  return ys.map((y, i) => (missing(y) ? null : (forward[i] + backward[i]) / 2));
}

const lastOf = (s) => s.mean.reduce((last, y, i) => (missing(y) ? last : i), 0);
const nearestTo = (s, step) => largest([...s.x.keys()], (i) => -Math.abs(s.x[i] - step));
// A point's value, with its range where that has other words.
function valueOf(s, i, words) {
  const mean = words(s.mean[i]), same = !(s.low[i] < s.high[i]) || words(s.low[i]) === words(s.high[i]);
  return same ? mean : `${mean} (${words(s.low[i])} to ${words(s.high[i])})`;
}
// The words for a cursor at a step; without one, the last values.
function readSeries(shown, words, step) {
  const lastOfMany = step === null && shown.length > 1;
  return shown.map((s) => {
    const i = step === null ? lastOf(s) : nearestTo(s, step);
    return `${s.name} ${valueOf(s, i, words)} ${lastOfMany ? "" : `at step ${format.whole(s.x[i])}`}`;
  }).join(" · ");
}
function paintBand(chart, context, s) {
  if (!s.x.some((_, i) => s.low[i] < s.high[i])) return;
  const highs = s.x.map((x, i) => [chart.px(x), chart.py(s.high[i])]);
  const lows = s.x.map((x, i) => [chart.px(x), chart.py(s.low[i])]);
  context.globalAlpha = 0.22;
  path(context, ...highs, ...lows.reverse());
  context.fill();
}
function paintSeries(chart, context, s, smoothed) {
  const many = smoothed && s.x.length > 60 && !s.heldOut, stroke = colour(s.colour);
  context.fillStyle = stroke;
  paintBand(chart, context, s);
  context.globalAlpha = many ? 0.45 : 1;
  line(chart, context, s.x, s.mean, stroke, many ? 0.8 : 1.8);
  context.globalAlpha = 1;
  if (many) line(chart, context, s.x, smooth(s.mean, s.x.length / 60), stroke, 2);
  if ((!s.heldOut || s.x.length > 60) && s.x.length > 1) return;
  for (const [i, x] of s.x.entries())
    context.beginPath(), context.arc(chart.px(x), chart.py(s.mean[i]), 3, 0, 7), context.fill();
}
function paintLevel(chart, context, shown, [exact]) {
  const { left, width, bottom } = chart, level = rounded(exact, 5);  // as the values are
  fill(context, "soft", left, chart.py(level), width, 1);
  context.fillStyle = colour("red");
  for (const s of shown) s.x.forEach((x, i) => s.high[i] > level && context.fillRect(chart.px(x), bottom - 5, 1, 5));
}

function stepAxis(shown) {
  const low = Math.min(...shown.map((s) => s.x[0])), high = Math.max(...shown.map((s) => s.x.at(-1)));
  return { low: low - (low === high), high: high + (low === high), format: format.count, label: "step" };
}
function valueAxis(shown, levels, words, log, low) {
  const all = [...shown.flatMap((s) => [...s.low, ...s.high]), ...levels.map(([level]) => level)];
  const sorted = all.filter((y) => !missing(y) && (!log || y > 0)).sort((a, b) => a - b);
  const bottom = low ?? sorted[0], top = sorted.at(-1), room = 0.05 * (top - bottom || Math.abs(top) || 1);
  if (log) return { low: bottom, high: Math.max(top, 1.01 * bottom), format: words, log };
  const unit = words === format.bytes ? unitOf(top) : 1;
  return { low: low ?? bottom - room, high: top + room, format: words, unit };
}

// series: {name, colour, x, mean, low, high, heldOut}. Where a point stands for several steps, the band from low to high
// shows all of their values. The line is smoothed where there are many. marks: steps; levels: [value, name]; the steps
// above one have a tick below.
function seriesChart({ title, series, words, log, low, marks, levels, smoothed }) {
  const shown = series.filter((s) => s.x.length > 0 && s.mean.some((y) => !missing(y)));
  if (shown.length === 0) return null;
  const lines = shown.length > 1 ? shown.map((s) => key(s.colour, s.name)) : [];
  const ways = shown.map((s) => `${s.name} from ${words(s.mean[0])} to ${words(s.mean[lastOf(s)])}`);
  return new Chart({
    title, label: `${title}: ${ways.join("; ")}`, legend: [lines, levels.map(([, name]) => key("soft", name))],
    x: stepAxis(shown), y: valueAxis(shown, levels, words, log, low),
    read: (step) => readSeries(shown, words, step),
    paint(chart, context) {
      marks.forEach((step) => fill(context, "soft", chart.px(step), 0, 1, chart.bottom));
      levels.forEach((level) => paintLevel(chart, context, shown, level));
      shown.forEach((s) => paintSeries(chart, context, s, smoothed));
    },
  }).figure;
}
