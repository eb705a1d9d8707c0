// What all pages share: elements, numbers in words, and pictures that draw themselves again when their size or the
// colours change. Values of the program come as data; text is always text, never markup.
"use strict";

// Marks that reverse the direction of the text after them are shown as unknown characters.
const embedded = document.getElementById("data")?.textContent ?? "{}";
const data = JSON.parse(embedded.replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd"));

const sum = (values, of = (value) => value) => values.reduce((total, value) => total + of(value), 0);
const largest = (values, of) => values.reduce((a, b) => (of(b) > of(a) ? b : a));
const spaced = (name) => name.replaceAll("_", " ");
const unique = (values) => [...new Set(values)];
const missing = (x) => x === null || x === undefined || Number.isNaN(x);

function element(tag, attributes = {}, ...children) {
  const result = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) result.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) result.setAttribute(name, value === true ? "" : value);
  }
  result.append(...children.flat(Infinity));
  return result;
}
const div = (name, ...children) => element("div", { class: name }, ...children);
const span = (name, ...children) => element("span", { class: name }, ...children);
const paragraph = (...children) => element("p", {}, ...children);
const soft = (...children) => element("p", { class: "soft" }, ...children);
const bad = (text) => element("p", { class: "bad" }, text);
const heading = (text) => element("h2", {}, text);
const subheading = (text) => element("h3", {}, text);
const monospace = (text) => element("code", {}, text);
// Of many squares, Tab reaches one; arrow keys go on from there.
function oneTabStop(container) {
  const squares = [...container.querySelectorAll(".field")];
  squares.forEach((square, i) => (square.tabIndex = i === 0 ? 0 : -1));
  container.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    squares[squares.indexOf(document.activeElement) + step]?.focus();
  });
  return container;
}
// What cannot be shown leaves the rest of the page as it is.
function part(make) {
  try {
    return make();
  } catch (error) {
    return bad(`This part cannot be shown, because its data is damaged: ${error.message}`);
  }
}
const caption = (...children) => element("figcaption", {}, ...children);
const output = (text) => element("output", { "aria-live": "polite" }, text);
const button = (text, onclick) => element("button", { onclick }, text);
// A small square that tells something when it is pointed at, or reached with the keyboard.
const field = (tell, attributes, text = "") =>
  element("button", { class: "field", onpointerenter: tell, onfocus: tell, ...attributes }, text);

// Columns of numbers are aligned at the right.
function table(header, rows) {
  const isNumber = (column) => column > 0 && rows.every((values) => /^[-\d]/.test(values[column]));
  const cell = (tag) => (value, column) => element(tag, { class: isNumber(column) ? "number" : "" }, value);
  const line = (tag, values) => element("tr", {}, values.map(cell(tag)));
  const head = header.length ? element("thead", {}, line("th", header)) : [];
  const body = element("tbody", {}, rows.map((values) => line("td", values)));
  return div("wide", element("table", {}, head, body));
}

function page(title, ...parts) {
  document.title = title;
  document.querySelector("main").replaceChildren(element("h1", {}, title), ...parts.flat(Infinity));
}

const rounded = (x, digits = 3) => Number(x.toPrecision(digits));
function scaled(x, base, units) {
  let unit = 0;
  while (Math.abs(x) >= 0.9995 * base && unit + 1 < units.length) x /= base, ++unit;
  return `${rounded(x)} ${units[unit]}`.trim();
}
const format = {
  bytes: (x) => scaled(x, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]),
  count: (x) => scaled(x, 1000, ["", "k", "M", "G", "T", "P", "E"]),
  flops: (x) => scaled(x, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]),
  whole: (x) => x.toLocaleString("en-US"),
  number(x) {
    if (Math.abs(x) >= 1e6) return x.toExponential(2);
    return x !== 0 && Math.abs(x) < 1e-4 ? rounded(x, 4).toExponential() : `${rounded(x, 4)}`;
  },
  percent: (x) => `${rounded(100 * x)}%`,
  seconds(x) {
    if (x < 1) return scaled(1e6 * x, 1000, ["µs", "ms"]);
    if (x < 180) return `${rounded(x)} s`;
    return x < 7200 ? `${Math.round(x / 60)} min` : `${(x / 3600).toFixed(1)} h`;
  },
};
for (const [name, words] of Object.entries(format))
  format[name] = (x) => (typeof x === "number" ? words(x) : "not a number");
const unitOf = (bytes) => 1024 ** Math.floor(Math.log(Math.max(bytes, 1)) / Math.log(1024));

// Colours are the custom properties of page.css.
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
function key(name, text) {
  const square = element("i");
  square.style.background = `var(--${name})`;
  return span("key", square, text);
}
function path(context, ...points) {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
}
function fill(context, name, x, y, width, height) {
  context.fillStyle = colour(name), context.fillRect(x, y, width, height);
}
function write(context, name, align, text, x, y) {
  context.fillStyle = colour(name), context.textAlign = align, context.fillText(text, x, y);
}

// A canvas as wide as its place. draw(context, width, height) works in CSS pixels.
const pictures = [];
class Picture {
  constructor(height, label, draw) {
    Object.assign(this, { height, draw });
    this.canvas = element("canvas", { role: "img", "aria-label": label });
    this.canvas.style.height = `${height}px`;
    pictures.push(this);
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
  }
  redraw() {
    const { canvas, height } = this, width = canvas.clientWidth;
    if (!canvas.isConnected || width === 0) return;
    const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
    canvas.width = Math.round(width * ratio), canvas.height = Math.round(height * ratio);
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    this.draw(context, width, height);
  }
}
const redrawAll = () => pictures.forEach((picture) => picture.redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
window.addEventListener("beforeprint", redrawAll);
