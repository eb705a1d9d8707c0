// A recorded walk (training/timeline.h): its cells and operations, memory by kind, and what lives in each layer and column.
"use strict";

// Numbers are stored as runs of equal differences: difference, count, difference, count.
function expand(runs) {
  const result = [];
  for (let i = 0, value = 0; i < runs.length; i += 2)
    for (let n = runs[i + 1]; n > 0; --n) result.push((value += runs[i]));
  return result;
}

class Walk {
  constructor(given, number) {
    Object.assign(this, given, { number });
    const { cells, operations, lists, names, passes } = given.timeline;
    this.operations = operations.map(([name, flops, micros, sent, copied, ...memory]) => {
      const delta = new Array(data.kinds.length).fill(0);
      for (let i = 0; i < memory.length; i += 2) delta[memory[i]] = memory[i + 1];
      return { name: names[name], flops, seconds: micros / 1e6, sent, copied, delta, more: sum(delta) };
    });
    this.lists = lists.map((list) => {
      const all = list.map((i) => this.operations[i]), total = (what) => sum(all, (o) => o[what]);
      return { all, peak: largest(all, (o) => o.more), flops: total("flops"), seconds: total("seconds"),
        sent: total("sent"), copied: total("copied") };
    });
    this.pass = expand(cells.pass).map((i) => passes[i]);
    for (const name of ["layer", "begin", "end"]) this[name] = expand(cells[name]);
    this.list = expand(cells.list).map((i) => this.lists[i]);
    this.memory = cells.memory.map(expand);
    this.size = this.pass.length;
    const upTo = (what) => this.list.reduce((all, list) => (all.push(all.at(-1) + list[what]), all), [0]);
    this.time = upTo("seconds"), this.work = upTo("flops"), this.wire = upTo("sent"), this.far = upTo("copied");
    this.total = this.list.map((list, i) => sum(this.memory, (of) => of[i]) + list.peak.more);
    this.peak = largest(this.total, (bytes) => bytes);
    this.columns = Math.ceil(data.length / this.chunk);
    this.blockRows = this.block > 0 ? this.block : data.length;
  }
  get duration() { return this.time[this.size]; }

  // The cell at a time, and its operation.
  at(seconds) {
    let low = 0, high = this.size - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.time[middle] <= seconds) low = middle;
      else high = middle - 1;
    }
    let from = this.time[low], operation = 0;
    const { all } = this.list[low], ended = () => from + all[operation].seconds <= seconds + 1e-12;
    while (operation + 1 < all.length && ended()) from += all[operation++].seconds;
    return { cell: low, operation, from };
  }
  // Bytes of each kind while an operation runs; without one, at the cell's peak.
  bytes(cell, operation = this.list[cell].peak) {
    return this.memory.map((of, kind) => of[cell] + operation.delta[kind]);
  }
  // What of a cell's pass an operation is: a backward cell computes its activations again first.
  part(cell, operation) {
    if (this.pass[cell] !== "backward") return this.pass[cell];
    const first = this.list[cell].all.findIndex((o) => /backward|dx|dw/.test(o.name));
    return operation < first ? "recompute" : "backward";
  }

  // What lives while a cell is computed, by layer and column, from the walk's rules (streambp.cuh): 1, or for dK, dV 2
  // where they are complete. freed: the layer that was closed just before.
  lives(upTo) {
    const grid = () => Array.from({ length: data.layers }, () => new Uint8Array(this.columns));
    const nothing = () => ({ input: grid(), kept: grid(), kv: grid(), dkv: grid() });
    const lastBlock = Math.floor((data.length - 1) / this.blockRows), before = this.replayed;
    // Goes on from where the last call ended, unless the cursor went back.
    let { cell, visit, keeps, state } =
      before?.cell <= upTo + 1 ? before : { cell: 0, visit: null, keeps: false, state: { ...nothing(), freed: null } };
    for (; cell <= upTo; ++cell) {
      const next = this.visitOf(cell);
      const same = visit && ["layer", "back", "block"].every((name) => visit[name] === next?.[name]);
      if (same) state.freed = null;
      else if (visit) this.close(state, visit);
      const done = !same && visit?.back && visit.layer === this.lowest && visit.block === 0;  // a micro-batch
      if (done) Object.assign(state, nothing()), keeps = false;
      visit = next;
      keeps ||= visit?.back === false && visit.block === lastBlock;
      if (visit) this.compute(state, cell, keeps);
    }
    this.replayed = { cell, visit, keeps, state };
    return state;
  }
  // Cells of the same layer, direction and block follow each other; null outside of the layers.
  visitOf(cell) {
    const layer = this.layer[cell], back = this.pass[cell] !== "forward";
    if (layer < 0 || layer >= data.layers) return null;
    return { layer, back, block: Math.floor(this.begin[cell] / this.blockRows) };
  }
  // What a cell adds to what lives.
  compute(state, cell, keeps) {
    const pass = this.pass[cell], layer = this.layer[cell], column = Math.floor(this.begin[cell] / this.chunk);
    state.kv[layer][column] = 1;
    if (pass === "backward") {
      for (let c = this.seenFrom(layer, this.begin[cell]); c < column; ++c) state.dkv[layer][c] ||= 1;
      state.dkv[layer][column] = 2;
    }
    if (pass !== "forward" || !keeps) return;
    if (layer === 0 && this.lowest === 0) state.input[0][column] = 1;
    if (layer + 1 < data.layers && layer + 1 >= this.lowest) state.input[layer + 1][column] = 1;
    if (layer >= this.lowest && this.keeps[layer]) state.kept[layer][column] = 1;
  }
  // The first column that a row of the layer attends to.
  seenFrom(layer, row) {
    const local = data.window > 0 && data.local[layer];
    return local ? Math.floor(Math.max(0, row - data.window) / this.chunk) : 0;
  }
  // What goes when a layer is left.
  close(state, { layer, back, block }) {
    const from = Math.floor((block * this.blockRows) / this.chunk);
    const to = Math.min(this.columns, Math.ceil(((block + 1) * this.blockRows) / this.chunk));
    const stays = this.block > 0 && this.stays[layer];
    // Of a layer with a window, what the next block sees of this one stays, and dK, dV of what this one sees before it.
    const end = to < this.columns ? this.seenFrom(layer, to * this.chunk) : to;
    if (!stays && (back || !this.keeps_kv[layer])) state.kv[layer].fill(0, from, end);
    if (back && !stays) state.dkv[layer].fill(0, from, to);
    if (back) state.input[layer].fill(0, from, to), state.kept[layer].fill(0, from, to);
    state.freed = { layer, from, to };
  }
}
