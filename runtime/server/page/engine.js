// The engine as it runs: figures, the block map, the requests.

import { ApiError, events, request } from "./api.js";
import { BlockMap, drawBars } from "./map.js";

const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const figure = (value) => (value < 100 ? short : whole).format(value);
const RETRY_MS = 2000;
const MAX_ROWS = 100;

export class EngineView {
  #map = new BlockMap(byId("map"));
  #rows = new Map(); // request id -> its row
  #owners = {};
  #pinned = null; // request ids whose blocks stand out
  #pointed = null;
  #stream = null; // AbortController
  #onRefusedKey;

  constructor(onRefusedKey) {
    this.#onRefusedKey = onRefusedKey;
    const map = byId("map");
    map.addEventListener("pointermove", (event) => this.#pointAt(this.#map.blocksAt(event)));
    map.addEventListener("pointerleave", () => this.#pointAt(null));
    map.addEventListener("click", (event) => this.#pin(this.#ownersOf(this.#map.blocksAt(event))[0] ?? null));
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#stream?.abort() : this.follow()));
  }

  // Shows what the server tells until the page is hidden; tries again when the connection is lost.
  async follow() {
    this.#stream?.abort();
    const stream = (this.#stream = new AbortController());
    while (!stream.signal.aborted) {
      try {
        const response = await request("stats/stream", { signal: stream.signal });
        for await (const data of events(response)) this.#show(JSON.parse(data));
        showHealth("lost", "connection lost");
      } catch (error) {
        if (stream.signal.aborted) return;
        if (error instanceof ApiError && error.status === 401) return this.#refused();
        if (error instanceof ApiError) showHealth("dead", error.message);
        else showHealth("lost", "no connection");
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  #refused() {
    showHealth("lost", "needs a key");
    this.#onRefusedKey();
  }

  #show(stats) {
    if (stats.error) return showHealth("dead", stats.error.message);
    showHealth("ready", "ready");
    const { blocks, step_ms: steps } = stats;
    say("tokens-rate", figure(stats.tokens_per_s));
    say("prompt-rate", figure(stats.prompt_tokens_per_s));
    say("hit-rate", `${short.format(stats.hit_rate * 100)} %`);
    say("num-running", whole.format(stats.running.length));
    say("num-waiting", whole.format(stats.waiting.length));
    say("preemptions", whole.format(stats.preemptions));
    say("pool", `${whole.format(blocks.total)} × ${blocks.block_size} tokens`);
    for (const state of ["free", "cached", "used", "shared"]) say(state, whole.format(blocks[state]));
    const { free, cached, used, shared } = blocks;
    byId("map").setAttribute(
      "aria-label", `Block pool: ${free} free, ${cached} cached, ${used} used, of these ${shared} shared`);
    this.#map.update(blocks.map);
    this.#owners = blocks.owners;
    this.#showRequests(stats);
    this.#light();
    const last = steps.recent.length ? `last ${ms(steps.last)}, ` : "";
    say("step-times", steps.recent.length ? `${last}mean ${ms(steps.mean)}, p99 ${ms(steps.p99)}` : "");
    drawBars(byId("steps"), steps.recent);
  }

  #showRequests({ running, waiting }) {
    const all = [
      ...running.map((r) => [r.id, "running", r.prompt_tokens, r.output_tokens, r.blocks]),
      ...waiting.map((r) => [r.id, `waiting ${short.format(r.waited_s)} s`, r.prompt_tokens, "", ""]),
    ];
    const shown = all.slice(0, MAX_ROWS), ids = new Set(shown.map(([id]) => id));
    for (const [id, row] of this.#rows) {
      if (!ids.has(id)) {
        row.remove();
        this.#rows.delete(id);
        if (this.#pinned === id) this.#pinned = null;
        if (this.#pointed === id) this.#pointed = null;
      }
    }
    for (const [id, ...values] of shown) {
      const row = this.#rows.get(id) ?? this.#addRow(id);
      values.forEach((value, i) => (row.cells[i + 1].textContent = value));
    }
    const more = all.length - shown.length;
    say("no-requests", all.length ? `and ${more} more` : "none");
    byId("no-requests").hidden = all.length > 0 && more === 0;
  }

  #addRow(id) {
    const row = byId("requests").insertRow();
    for (let i = 0; i < 5; i++) row.insertCell();
    const button = row.cells[0].appendChild(document.createElement("button"));
    button.type = "button";
    button.textContent = id.length > 10 ? `…${id.slice(-8)}` : id;
    button.title = `Show the blocks of ${id}`;
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => this.#pin(this.#pinned === id ? null : id));
    button.addEventListener("focus", () => this.#point(id));
    button.addEventListener("blur", () => this.#point(null));
    row.addEventListener("pointerenter", () => this.#point(id));
    row.addEventListener("pointerleave", () => this.#point(null));
    this.#rows.set(id, row);
    return row;
  }

  #pin(id) {
    this.#pinned = id;
    this.#light();
  }

  #point(id) {
    this.#pointed = id;
    this.#light();
  }

  #light() {
    const id = this.#pointed ?? this.#pinned;
    this.#map.light(id === null ? null : this.#owners[id] ?? []);
    for (const [other, row] of this.#rows) {
      row.classList.toggle("lit", other === id);
      row.cells[0].firstChild.setAttribute("aria-pressed", String(other === this.#pinned));
    }
  }

  #pointAt(blocks) {
    if (!blocks) return say("block", "Point at a block, or choose a request below.");
    const [first, last] = blocks, owners = this.#ownersOf(blocks);
    const name = first === last ? `Block ${first}` : `Blocks ${first} to ${last}`;
    say("block", `${name}: ${this.#map.stateOf(first, last)}${owners.length ? `, of ${owners.join(", ")}` : ""}`);
  }

  #ownersOf(blocks) {
    if (!blocks) return [];
    const [first, last] = blocks, inside = (block) => first <= block && block <= last;
    return Object.keys(this.#owners).filter((id) => this.#owners[id].some(inside));
  }
}

function say(id, words) {
  const element = byId(id);
  if (element.textContent !== words) element.textContent = words;
}

function showHealth(state, words) {
  byId("health").dataset.state = state;
  say("health", words);
}

const ms = (value) => `${value < 10 ? value.toFixed(2) : value.toFixed(1)} ms`;
