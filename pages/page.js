// What all pages share: elements, numbers in words, and pictures that draw themselves again when their size or the colours
// change. Values of the program come as data; text is always text, never markup.
"use strict";

const data = JSON.parse(document.getElementById("data")?.textContent ?? "{}");

function element(tag, attributes = {}, ...children) {
  const result = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) result.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) result.setAttribute(name, value === true ? "" : value);
  }
  result.append(...children.flat(2));
  return result;
}

function table(header, rows) {
  const cells = (tag, values) =>
    values.map((value, i) => element(tag, { class: i > 0 && rows.every((row) => /^[-\d]/.test(row[i])) ? "number" : "" }, value));
  return element("div", { class: "wide" }, element("table", {},
    header.length ? element("thead", {}, element("tr", {}, cells("th", header))) : [],
    element("tbody", {}, rows.map((row) => element("tr", {}, cells("td", row))))));
}

// Colours are the custom properties of page.css.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
function key(name, text) {
  const square = element("i");
  square.style.background = `var(--${name})`;
  return element("span", { class: "key" }, square, text);
}

const missing = (x) => x === null || x === undefined || Number.isNaN(x);
function scaled(x, base, units, digits = 3) {
  let unit = 0;
  while (Math.abs(x) >= 0.9995 * base && unit + 1 < units.length) x /= base, ++unit;
  return `${Number(x.toPrecision(digits))} ${units[unit]}`.trim();
}
const format = {
  bytes: (x) => scaled(x, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]),
  count: (x) => scaled(x, 1000, ["", "k", "M", "G", "T", "P", "E"]),
  whole: (x) => x.toLocaleString("en-US"),
  number: (x) => (missing(x) ? "not a number" : String(Number(x.toPrecision(4)))),
  percent: (x) => `${Number((100 * x).toPrecision(3))}%`,
  seconds: (x) => (x < 1 ? scaled(1e6 * x, 1000, ["µs", "ms"]) : x < 180 ? `${Number(x.toPrecision(3))} s`
    : x < 7200 ? `${Math.round(x / 60)} min` : `${(x / 3600).toFixed(1)} h`),
};

const unitOf = (bytes) => 1024 ** Math.floor(Math.log(Math.max(bytes, 1)) / Math.log(1024));  // its unit in format.bytes

// About n round numbers between two.
function ticks(low, high, n = 5) {
  const rough = (high - low) / n, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough) * power, result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; ++i) result.push(i * step);
  return result;
}

// A canvas as wide as its place. draw(context, width, height) works in CSS pixels.
const pictures = [];
class Picture {
  constructor(height, label, draw) {
    this.canvas = element("canvas", { role: "img", "aria-label": label });
    this.height = height, this.draw = draw;
    this.canvas.style.height = height + "px";
    pictures.push(this);
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
  }
  redraw() {
    if (!this.canvas.isConnected) return;
    const ratio = window.devicePixelRatio || 1, width = this.canvas.clientWidth, context = this.canvas.getContext("2d");
    if (width === 0) return;
    this.canvas.width = Math.round(width * ratio), this.canvas.height = Math.round(this.height * ratio);
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    this.draw(context, width, this.height);
  }
}
const redrawAll = () => pictures.forEach((picture) => picture.redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
window.addEventListener("beforeprint", redrawAll);

// Shows the page: its title, and what to say before anything is touched.
function page(title, introduction, ...parts) {
  document.title = title;
  document.querySelector("main").replaceChildren(element("h1", {}, title), ...introduction.map((text) => element("p", {}, text)), ...parts.flat(3));
}
