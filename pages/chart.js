// Charts: a frame with axes, lines with the range of the values that they stand for, and stacked areas. A cursor follows
// the pointer, or the arrow keys.
"use strict";

class Chart {
  // x, y: {low, high, format, label}; y may have log, and the unit of which its ticks are multiples. paint(chart, context) draws between the axes. read(x) returns the
  // words for a cursor at x.
  constructor({ title, height = 220, x, y, paint, read, label, choose }) {
    Object.assign(this, { x, y, paint, read, choose, cursor: null });
    this.picture = new Picture(height, label ?? title, (context, width, height) => this.drawAll(context, width, height));
    this.output = element("output", { "aria-live": "polite" }, read ? read(null) : "");
    const canvas = this.picture.canvas;
    this.figure = element("figure", {}, element("h3", {}, title), this.output, canvas);
    if (!read && !choose) return;
    canvas.tabIndex = 0;
    const move = (event) => this.move(this.inverse(event.clientX - canvas.getBoundingClientRect().left));
    canvas.addEventListener("pointermove", (event) => (!choose || event.buttons) && move(event));
    canvas.addEventListener("pointerdown", move);
    canvas.addEventListener("pointerleave", () => choose || this.move(null));
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

  drawAll(context, width, height) {
    const { x, y } = this;
    this.left = 58, this.width = width - 70, this.bottom = height - 36;
    context.textBaseline = "middle";
    const inY = y.log ? logTicks(y.low, y.high) : ticks(y.low / (y.unit ?? 1), y.high / (y.unit ?? 1), 4).map((tick) => tick * (y.unit ?? 1));
    for (const tick of inY) {
      context.fillStyle = colour("line"), context.fillRect(this.left, this.py(tick), this.width, 1);
      context.fillStyle = colour("soft"), context.textAlign = "right", context.fillText(y.format(tick), this.left - 6, this.py(tick));
    }
    context.textAlign = "center";
    for (const tick of ticks(x.low, x.high, Math.min(6, this.width / 80))) context.fillText(x.format(tick), this.px(tick), this.bottom + 12);
    context.textAlign = "right", context.fillText(x.label, this.left + this.width, this.bottom + 28);
    context.save();
    context.beginPath(), context.rect(this.left, 0, this.width + 1, this.bottom + 1), context.clip();
    this.paint(this, context);
    if (this.cursor !== null) context.fillStyle = colour("ink"), context.fillRect(this.px(this.cursor), 0, 1, this.bottom);
    context.restore();
  }
}

function logTicks(low, high) {
  const result = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); ++power)
    for (const m of high / low > 1000 ? [1] : [1, 2, 5])
      if (m * 10 ** power >= low && m * 10 ** power <= high) result.push(m * 10 ** power);
  return result;
}

function line(chart, context, xs, ys, stroke, width = 1.6) {
  context.strokeStyle = stroke, context.lineWidth = width, context.lineJoin = "round";
  context.beginPath();
  let down = false;
  xs.forEach((x, i) => {
    if (missing(ys[i])) return (down = false);
    down ? context.lineTo(chart.px(x), chart.py(ys[i])) : context.moveTo(chart.px(x), chart.py(ys[i]));
    down = true;
  });
  context.stroke();
}

// The average of a point and its neighbours, with weights that fall with their distance.
function smooth(ys, reach) {
  const pass = (values, order) => {
    const keep = reach / (reach + 1), result = [];
    let sum = 0, weight = 0;
    for (const i of order) {
      if (!missing(values[i])) sum = keep * sum + values[i], weight = keep * weight + 1;
      result[i] = weight > 0 ? sum / weight : null;
    }
    return result;
  };
  const order = ys.map((_, i) => i), forward = pass(ys, order), backward = pass(ys, order.slice().reverse());
  return ys.map((y, i) => (missing(y) ? null : (forward[i] + backward[i]) / 2));
}

// Series of values over steps: {name, colour, x, mean, low, high, dots}. Where a point stands for several steps, the band
// from low to high shows all of their values. The line is smoothed where there are many. marks: [step, colour]; levels:
// [value, name]; the steps above one have a tick below.
function seriesChart({ title, series, format: words = format.number, log = false, low, marks = [], levels = [], smoothed = true }) {
  const shown = series.filter((s) => s.x.length > 0 && s.mean.some((y) => !missing(y)));
  if (shown.length === 0) return null;
  const all = [...shown.flatMap((s) => [...s.low, ...s.high]), ...levels.map(([y]) => y)].filter((y) => !missing(y) && (!log || y > 0));
  const sorted = all.slice().sort((a, b) => a - b), bottom = low ?? sorted[0], top = sorted[sorted.length - 1];
  const room = log ? 1 : 0.05 * (top - bottom || Math.abs(top) || 1);
  const x = { low: Math.min(...shown.map((s) => s.x[0])), high: Math.max(...shown.map((s) => s.x[s.x.length - 1])), format: format.count, label: "step" };
  if (x.low === x.high) x.low -= 1, x.high += 1;
  const nearest = (s, at) => s.x.reduce((best, x, i) => (Math.abs(x - at) < Math.abs(s.x[best] - at) ? i : best), 0);
  const last = (s) => s.mean.reduce((best, y, i) => (missing(y) ? best : i), 0);
  const value = (s, i) => (s.low[i] < s.high[i] && words(s.low[i]) !== words(s.high[i])
    ? `${words(s.mean[i])} (${words(s.low[i])} to ${words(s.high[i])})` : words(s.mean[i]));
  return new Chart({
    title, x, marks,
    y: { low: log ? bottom : bottom - (low === undefined ? room : 0), high: log ? Math.max(top, 1.01 * bottom) : top + room, format: words, log, unit: words === format.bytes ? unitOf(top) : 1 },
    label: `${title}: ${shown.map((s) => `${s.name} from ${words(s.mean[0])} to ${words(s.mean[last(s)])}`).join("; ")}`,
    read: (at) => shown.map((s) => {
      const i = at === null ? last(s) : nearest(s, at);
      return `${s.name} ${value(s, i)} ${at === null && shown.length > 1 ? "" : `at step ${format.whole(s.x[i])}`}`;
    }).join(" · "),
    paint(chart, context) {
      for (const [step, name] of marks) context.fillStyle = colour(name), context.fillRect(chart.px(step), 0, 1, chart.bottom);
      for (const [level, name] of levels) {
        context.fillStyle = colour("soft"), context.fillRect(chart.left, chart.py(level), chart.width, 1);
        context.textAlign = "right", context.fillText(name, chart.left + chart.width - 4, chart.py(level) + 9);
        context.fillStyle = colour("red");
        for (const s of shown) s.x.forEach((x, i) => s.high[i] > level && context.fillRect(chart.px(x), chart.bottom - 5, 1, 5));
      }
      for (const s of shown) {
        const many = smoothed && s.x.length > 60 && !s.dots, stroke = colour(s.colour);
        context.fillStyle = stroke;
        context.globalAlpha = 0.22;
        if (s.x.some((_, i) => s.low[i] < s.high[i])) {
          context.beginPath();
          s.x.forEach((x, i) => context.lineTo(chart.px(x), chart.py(s.high[i] ?? s.low[i] ?? 0)));
          s.x.map((x, i) => [x, s.low[i]]).reverse().forEach(([x, y]) => context.lineTo(chart.px(x), chart.py(y ?? 0)));
          context.fill();
        }
        context.globalAlpha = many ? 0.45 : 1;
        line(chart, context, s.x, s.mean, stroke, many ? 0.8 : 1.8);
        context.globalAlpha = 1;
        if (many) line(chart, context, s.x, smooth(s.mean, s.x.length / 60), stroke, 2);
        if (s.dots || s.x.length === 1) s.x.forEach((x, i) => {
          context.beginPath(), context.arc(chart.px(x), chart.py(s.mean[i]), 3, 0, 7), context.fill();
        });
      }
    },
  }).figure;
}
