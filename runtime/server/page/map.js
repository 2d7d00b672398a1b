// The block pool as a map: one cell a block, row by row; in a large pool a cell stands for several blocks
// and shows the busiest of them. Only cells that change are painted.

const STATES = { s: "shared", u: "used", c: "cached", "#": "scratch", ".": "free" }; // the busiest first
const ORDER = Object.keys(STATES).join("");
const LARGEST = 16, SMALLEST = 4, MAX_HEIGHT = 220; // CSS pixels
const DIMMED = 0.18;

export class BlockMap {
  #canvas;
  #context;
  #map = "";
  #cells = ""; // the state of each cell
  #share = 1; // blocks of a cell
  #lit = null; // Set of cells that stand out, or null
  #size = 0;
  #columns = 0;
  #colours = {};

  constructor(canvas) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d");
    new ResizeObserver(() => this.#layOut()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#layOut());
  }

  // `map`: a character per block.
  update(map) {
    const resized = map.length !== this.#map.length;
    this.#map = map;
    if (resized) return this.#layOut();
    const before = this.#cells;
    this.#cells = busiest(map, this.#share);
    for (let i = 0; i < this.#cells.length; i++) if (this.#cells[i] !== before[i]) this.#paint(i);
  }

  // These blocks stand out; null: all are equal.
  light(blocks) {
    if (!blocks && !this.#lit) return;
    this.#lit = blocks && new Set(blocks.map((block) => Math.floor(block / this.#share)));
    this.#paintAll();
  }

  // The first and the last block of the cell under a pointer, or null.
  blocksAt(event) {
    const column = Math.floor(event.offsetX / this.#size);
    const cell = Math.floor(event.offsetY / this.#size) * this.#columns + column;
    if (column >= this.#columns || !this.#cells[cell]) return null;
    return [cell * this.#share, Math.min((cell + 1) * this.#share, this.#map.length) - 1];
  }

  stateOf(first, last) {
    return STATES[busiest(this.#map.slice(first, last + 1), last - first + 1)];
  }

  #layOut() {
    const width = this.#canvas.clientWidth;
    if (!width || !this.#map) return;
    const rows = (size, share) => Math.ceil(Math.ceil(this.#map.length / share) / Math.floor(width / size));
    this.#size = LARGEST;
    this.#share = 1;
    while (this.#size > SMALLEST && rows(this.#size, 1) * this.#size > MAX_HEIGHT) this.#size--;
    while (rows(this.#size, this.#share) * this.#size > MAX_HEIGHT) this.#share++;
    this.#columns = Math.floor(width / this.#size);
    this.#cells = busiest(this.#map, this.#share);
    this.#lit = null;
    const height = rows(this.#size, this.#share) * this.#size, scale = window.devicePixelRatio || 1;
    this.#canvas.style.height = `${height}px`;
    this.#canvas.width = Math.round(width * scale);
    this.#canvas.height = Math.round(height * scale);
    this.#context.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(this.#canvas);
    for (const state of Object.values(STATES)) this.#colours[state] = style.getPropertyValue(`--${state}`);
    this.#paintAll();
  }

  #paintAll() {
    for (let i = 0; i < this.#cells.length; i++) this.#paint(i);
  }

  #paint(i) {
    const x = (i % this.#columns) * this.#size, y = Math.floor(i / this.#columns) * this.#size;
    const inner = this.#size > 5 ? this.#size - 2 : this.#size - 1;
    this.#context.clearRect(x, y, this.#size, this.#size);
    this.#context.globalAlpha = this.#lit && !this.#lit.has(i) ? DIMMED : 1;
    this.#context.fillStyle = this.#colours[STATES[this.#cells[i]]];
    this.#context.fillRect(x, y, inner, inner);
  }
}

// Of each `share` characters the busiest.
function busiest(map, share) {
  if (share === 1) return map;
  let cells = "";
  for (let i = 0; i < map.length; i += share) {
    let best = ORDER.length - 1;
    for (let j = i; j < Math.min(i + share, map.length); j++) best = Math.min(best, ORDER.indexOf(map[j]));
    cells += ORDER[best];
  }
  return cells;
}

// Values as bars, the newest at the right.
export function drawBars(canvas, values) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = getComputedStyle(canvas).getPropertyValue("--used");
  const step = 4, shown = values.slice(-Math.floor(width / step)), most = Math.max(...shown, 1e-9);
  shown.forEach((value, i) => {
    const bar = Math.max((value / most) * height, 1);
    context.fillRect(width - (shown.length - i) * step, height - bar, step - 1, bar);
  });
}
