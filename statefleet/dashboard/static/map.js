// Shards as a table: a row for each query, a column for each store actor, with its node and the executors there.
import { h, keyed, setClass, setText } from "./dom.js";
import * as f from "./format.js";
import { allShards, fleet } from "./feed.js";
import { openShard } from "./shard.js";

const MANY = 300;
const MOVED_MS = 6000;
const nobody = " nobody";

const work = (shard) => (shard.apply_ms === null ? null : shard.apply_ms + shard.write_ms);
const COLOURS = {
  rows_in: ["rows in the newest batch", (shard) => shard.rows_in, f.count],
  work: ["time for the newest batch", work, f.duration],
  state_rows: ["rows held", (shard) => shard.state_rows, f.count],
  state_bytes: ["bytes held", (shard) => shard.state_bytes, f.bytes],
  locality: ["locality", (shard) => shard.locality, f.percent],
};

export function mapCard() {
  let colour = "rows_in";
  const before = new Map(); // store actor of each shard, to see it move
  const choose = h("select", { "aria-label": "Colour of shards", onchange: () => ((colour = choose.value), update()) },
    Object.entries(COLOURS).map(([name, [text]]) => h("option", { value: name }, text)));
  const legend = h("div", { class: "legend" });
  const columns = h("tr", {});
  const body = h("tbody");
  const table = h("table", { class: "map", onkeydown: walk }, h("thead", {}, columns), body);
  const scroll = h("div", { class: "scroll" }, table);
  const empty = h("p", { class: "empty" });
  const element = h("section", { class: "card", "aria-labelledby": "map-title" },
    h("div", { class: "head" }, h("h2", { id: "map-title" }, "Where shards are"), h("div", { class: "controls" }, h("label", {}, "colour", choose))),
    legend, empty, scroll);

  function update() {
    const { actors, queries } = fleet;
    const shards = allShards();
    const largest = Math.max(0, ...shards.map((shard) => COLOURS[colour][1](shard) ?? 0));
    drawLegend(legend, colour, largest);
    table.classList.toggle("many", shards.length > MANY);
    const isEmpty = !Object.keys(actors).length && !shards.length;
    empty.hidden = !isEmpty;
    scroll.hidden = isEmpty;
    setText(empty, "No store actor has reported yet, and no query has used this fleet. Start one: fleet.stateful(df, name=…).");
    const counts = new Map();
    for (const shard of shards) counts.set(holderOf(shard), (counts.get(holderOf(shard)) ?? 0) + 1);
    const holders = sorted(new Set([...Object.keys(actors), ...counts.keys()]));
    drawHeads(columns, holders, counts);
    keyed(body, Object.keys(queries), () => h("tr"), (row, name) => {
      const placed = new Map(holders.map((holder) => [holder, []]));
      for (const shard of queries[name].shards) placed.get(holderOf(shard)).push(shard);
      keyed(row, [" query", ...holders], (holder) => (holder === " query" ? makeName(name) : h("td", { "data-holder": holder }, h("div", { class: "cells" }))), (cell, holder) => {
        if (holder === " query") return;
        setClass(cell, actors[holder]?.alive === false ? "lost" : "");
        const here = new Map(placed.get(holder).map((shard) => [shard.partition_id, shard]));
        keyed(cell.firstChild, [...here.keys()], (number) => makeCell(name, number), (square, number) => drawCell(square, here.get(number), holder, { colour, largest, before }));
      });
    });
    if (!body.querySelector('.cell[tabindex="0"]')) body.querySelector(".cell")?.setAttribute("tabindex", "0");
  }
  // Arrow keys go from shard to shard, so that the whole map is one stop of the tabulator.
  function walk(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !event.target.classList.contains("cell")) return;
    event.preventDefault();
    const cells = [...body.querySelectorAll(".cell")];
    const place = cells.indexOf(event.target) + step;
    const next = cells[Math.max(0, Math.min(cells.length - 1, place))];
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
  return { element, update };
}

const holderOf = (shard) => shard.actor_name ?? nobody;

// Store actors by their nodes; last, nobody, if somebody has to be found for a shard.
function sorted(holders) {
  const node = (name) => fleet.actors[name]?.host ?? "~";
  return [...holders].sort((a, b) => (a === nobody) - (b === nobody) || node(a).localeCompare(node(b), "en", { numeric: true }) || (a < b ? -1 : 1));
}

function drawHeads(row, holders, counts) {
  const executors = executorsByHost();
  keyed(row, [" query", ...holders], (name) => (name === " query" ? h("th", { scope: "col" }, "query") : makeHead()), (head, name) => {
    if (name === " query") return;
    const actor = fleet.actors[name];
    const isLost = actor !== undefined && !actor.alive;
    setClass(head, isLost ? "actor lost" : "actor");
    head.dataset.actor = name;
    const parts = head.parts;
    setText(parts.host, name === nobody ? "On no store actor" : f.actorName(name));
    parts.host.title = name === nobody ? "" : `${name}, node ${actor?.node_id ?? "gone"}`;
    const facts = [actor && (isLost ? "lost" : `pid ${actor.pid}`), name === nobody ? "placed with the next batch" : null, f.plural(counts.get(name) ?? 0, "shard")];
    if (actor?.resident_bytes) {
      facts.push(f.bytes(actor.resident_bytes));
      parts.facts.title = `${f.bytes(actor.resident_bytes)} of memory, of ${f.bytes(actor.memory_limit)}`;
    }
    if (actor?.spilled_bytes) facts.push(`${f.bytes(actor.spilled_bytes)} spilled`);
    setText(parts.facts, facts.filter(Boolean).join(" · "));
    parts.facts.classList.toggle("bad", isLost);
    const chips = [...(executors.get(actor?.host) ?? [])];
    if (fleet.drained.includes(actor?.node_id)) chips.push("drained");
    keyed(parts.chips, chips, (text) => h("span", { class: text.endsWith(" lost") ? "chip gone" : "chip" }, text));
    parts.chips.hidden = !chips.length;
  });
}

// Those that live, and those that were lost and have no successor on their node.
function executorsByHost() {
  const found = new Map();
  for (const one of fleet.executors) {
    if (!one.alive && (one.is_expected || isReplaced(one))) continue;
    found.set(one.host, [...(found.get(one.host) ?? []), `executor ${one.executor_id}${one.alive ? "" : " lost"}`]);
  }
  return found;
}

export const isReplaced = (lost) => fleet.executors.some((one) => one.alive && one.host === lost.host);

function makeHead() {
  const parts = { host: h("span", { class: "host" }), facts: h("div", { class: "soft small num facts-line" }), chips: h("div", { class: "chips" }) };
  const element = h("th", { scope: "col", class: "actor" }, parts.host, parts.facts, parts.chips);
  element.parts = parts;
  return element;
}

function drawCell(cell, shard, holder, { colour, largest, before }) {
  const id = `${shard.state}/${shard.partition_id}`;
  const former = before.get(id);
  if (former !== undefined && former !== holder) cell.movedAt = Date.now();
  before.set(id, holder);
  const isMoved = Date.now() - (cell.movedAt ?? 0) < MOVED_MS;
  setClass(cell, `cell ${level(shard, colour, largest)}${isMoved ? " moved" : ""}`);
  setText(cell, String(shard.partition_id));
  const [text, value, show] = COLOURS[colour];
  const label = `${shard.state}, shard ${shard.partition_id}: version ${f.count(shard.version)}, ${text} ${show(value(shard))}`;
  if (cell.title !== label) {
    cell.title = label;
    cell.setAttribute("aria-label", label);
  }
}

const makeName = (name) => h("th", { scope: "row" }, h("a", { href: `#/queries/${encodeURIComponent(name)}` }, name));
const makeCell = (name, number) => h("button", { class: "cell", type: "button", tabindex: "-1", "data-shard": `${name}/${number}`, onclick: () => openShard(name, number) });

// Five steps between nothing and the largest value; locality has fixed ones.
function level(shard, colour, largest) {
  const value = COLOURS[colour][1](shard);
  if (value === null || value === undefined) return "s0";
  if (colour === "locality") return `l${value >= 0.995 ? 4 : Math.min(3, Math.floor(value * 4))}`;
  return value <= 0 || !largest ? "s0" : `s${Math.max(1, Math.ceil((value / largest) * 5))}`;
}

function drawLegend(legend, colour, largest) {
  const [text, , show] = COLOURS[colour];
  const steps = colour === "locality"
    ? [["s0", "not known"], ["l0", "under 25 %"], ["l1", "25 %"], ["l2", "50 %"], ["l3", "75 %"], ["l4", "all local"]]
    : [["s0", "none"], ...[1, 2, 3, 4, 5].map((step) => [`s${step}`, `≤ ${show(Math.ceil((largest * step) / 5))}`])];
  legend.replaceChildren(h("strong", {}, text), ...steps.map(([name, label]) => h("span", {}, h("i", { class: `swatch ${name}` }), label)));
}
