// Shards on store actors on nodes, with the executors that work there.
import { h, keyed, setClass, setText } from "./dom.js";
import * as f from "./format.js";
import { fleet } from "./feed.js";
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

export function mapView() {
  let colour = "rows_in";
  let query = "";
  const before = new Map(); // store actor of each shard, to see it move
  const tiles = h("dl", { class: "tiles" });
  const choose = h("select", { "aria-label": "Colour of shards", onchange: () => ((colour = choose.value), update()) },
    Object.entries(COLOURS).map(([name, [text]]) => h("option", { value: name }, text)));
  const only = h("select", { "aria-label": "Query that is shown", onchange: () => ((query = only.value), update()) });
  const legend = h("div", { class: "legend" });
  const nodes = h("div", { class: "nodes", onkeydown: walk });
  const empty = h("p", { class: "empty" });
  const element = h("div", { class: "view" }, tiles,
    h("section", { class: "card", "aria-labelledby": "map-title" },
      h("div", { class: "head" }, h("h2", { id: "map-title" }, "Shards on store actors"),
        h("div", { class: "controls" }, h("label", {}, "colour", choose), h("label", {}, "query", only))),
      legend, empty, nodes));

  function update() {
    const { actors, queries, shards } = fleet.tables;
    drawTiles(tiles, actors, queries, shards);
    const names = Object.keys(queries);
    keyed(only, ["", ...names], (name) => h("option", { value: name }, name || "all"));
    if (query && !queries[query]) query = only.value = "";
    const levels = scale(Object.values(shards), colour);
    drawLegend(legend, colour, levels);
    const total = Object.keys(shards).length;
    nodes.classList.toggle("many", total > MANY);
    const isEmpty = !Object.keys(actors).length && !total;
    empty.hidden = !isEmpty;
    setText(empty, "No store actor has reported yet, and no query has used this fleet. Start one: fleet.stateful(df, name=…).");
    drawNodes(nodes, actors, shards, { colour, query, levels, before });
  }
  // Arrow keys go from shard to shard, so that the whole map is one stop of the tabulator.
  function walk(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !event.target.classList.contains("cell")) return;
    event.preventDefault();
    const cells = [...nodes.querySelectorAll(".cell")];
    const place = cells.indexOf(event.target) + step;
    const next = cells[Math.max(0, Math.min(cells.length - 1, place))];
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
  return { element, update, uses: ["actors", "queries", "shards"] };
}

function drawTiles(tiles, actors, queries, shards) {
  const all = Object.values(queries);
  const running = all.filter((one) => one.active);
  const lost = Object.values(actors).filter((one) => !one.alive).length;
  const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);
  const local = Object.values(shards).filter((one) => one.locality !== null);
  const lags = running.map((one) => one.last_commit_ms).filter((one) => one !== null);
  const figures = {
    "Queries": [f.count(all.length), `${f.count(running.length)} running`],
    "Rows a second": [f.brief(sum(running, "rows_per_second")), "of running queries"],
    "State rows": [f.brief(sum(all, "state_rows")), "all queries"],
    "State": [f.bytes(sum(all, "state_bytes")), "in memory and on disk"],
    "Shards": [f.count(Object.keys(shards).length), `on ${f.plural(Object.keys(actors).length, "store actor")}`],
    "Store actors": [f.count(Object.keys(actors).length - lost), lost ? `${lost} lost` : "all answer"],
    "Locality": [local.length ? f.percent(sum(local, "locality") / local.length) : f.unknown, "tasks at their shard"],
    "Oldest commit": [lags.length ? f.duration(Math.max(0, Date.now() + fleet.clockMs - Math.min(...lags))) : f.unknown, "of running queries, ago"],
  };
  keyed(tiles, Object.keys(figures),
    (name) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, h("span"), h("span", { class: "more" }))),
    (tile, name) => {
      const [figure, more] = tile.querySelectorAll("dd span");
      setText(figure, figures[name][0]);
      setText(more, figures[name][1]);
      more.classList.toggle("bad", name === "Store actors" && lost > 0);
    });
}

// Five steps between nothing and the largest value; locality has fixed ones.
function scale(shards, colour) {
  if (colour === "locality") return null;
  const value = COLOURS[colour][1];
  return Math.max(0, ...shards.map((shard) => value(shard) ?? 0));
}

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

function drawNodes(parent, actors, shards, options) {
  const byActor = new Map(Object.keys(actors).map((name) => [name, []]));
  for (const [id, shard] of Object.entries(shards)) {
    const name = shard.actor_name ?? nobody;
    if (!byActor.has(name)) byActor.set(name, []);
    byActor.get(name).push(id);
  }
  const byNode = new Map();
  for (const name of [...byActor.keys()].sort()) {
    const node = actors[name]?.node_id ?? (name === nobody ? nobody : shards[byActor.get(name)[0]]?.node_id ?? nobody);
    if (!byNode.has(node)) byNode.set(node, []);
    byNode.get(node).push(name);
  }
  const executors = executorsByHost(shards);
  keyed(parent, [...byNode.keys()].sort((a, b) => (a === nobody) - (b === nobody) || (a < b ? -1 : 1)), makeNode, (element, node) => {
    const names = byNode.get(node);
    const of = names.map((name) => actors[name]).filter(Boolean);
    const own = element.parts;
    setText(own.host, node === nobody ? "On no store actor" : of[0]?.host ?? "a node that is gone");
    setText(own.id, node === nobody ? "placed with the next batch" : `node ${f.shortId(node)}`);
    const chips = (executors.get(of[0]?.host) ?? []).map((name) => `executor ${name}`);
    if (of.some((one) => one.drained)) chips.push("drained");
    keyed(own.chips, chips, (text) => h("span", { class: "chip" }, text));
    own.chips.hidden = !chips.length;
    keyed(own.actors, names, makeActor, (box, name) => drawActor(box, name, actors[name], byActor.get(name), shards, options));
  });
  if (!parent.querySelector('.cell[tabindex="0"]')) parent.querySelector(".cell")?.setAttribute("tabindex", "0");
}

// Those whose tasks made the newest version of any shard, wherever that is.
function executorsByHost(shards) {
  const names = new Set(Object.values(shards).map((shard) => shard.executor).filter(Boolean));
  const found = new Map();
  for (const name of [...names].sort()) {
    const host = name.slice(0, name.lastIndexOf(":"));
    found.set(host, [...(found.get(host) ?? []), name]);
  }
  return found;
}

function makeNode() {
  const parts = { host: h("h3"), id: h("span", { class: "soft small mono" }), chips: h("div", { class: "chips" }), actors: h("div") };
  const element = h("div", { class: "node" }, h("div", { class: "title" }, parts.host, parts.id), parts.chips, parts.actors);
  element.parts = parts;
  return element;
}

function makeActor() {
  const parts = { name: h("span", { class: "name small mono" }), facts: h("span", { class: "soft small num" }), cells: h("div", { class: "cells", role: "group" }) };
  const element = h("div", { class: "actor" }, h("div", { class: "title" }, parts.name, parts.facts), parts.cells);
  element.parts = parts;
  return element;
}

function drawActor(element, name, actor, ids, shards, { colour, query, levels, before }) {
  const isLost = actor !== undefined && !actor.alive;
  setClass(element, isLost ? "actor lost" : "actor");
  element.dataset.actor = name;
  setText(element.parts.name, name === nobody ? "nobody" : f.actorName(name));
  element.parts.name.title = name;
  const facts = [actor && (isLost ? "lost" : `pid ${actor.pid}`), f.plural(ids.length, "shard")];
  if (actor?.resident_bytes) facts.push(`${f.bytes(actor.resident_bytes)} of ${f.bytes(actor.memory_limit)}`);
  if (actor?.spilled_bytes) facts.push(`${f.bytes(actor.spilled_bytes)} spilled`);
  setText(element.parts.facts, facts.filter(Boolean).join(" · "));
  element.parts.facts.classList.toggle("bad", isLost);
  element.parts.cells.setAttribute("aria-label", `Shards of ${f.actorName(name)}`);
  keyed(element.parts.cells, ids, makeCell, (cell, id) => {
    const shard = shards[id];
    const former = before.get(id);
    if (former !== undefined && former !== name) cell.movedAt = Date.now();
    before.set(id, name);
    const isMoved = Date.now() - (cell.movedAt ?? 0) < MOVED_MS;
    setClass(cell, `cell ${level(shard, colour, levels)}${query && query !== shard.state ? " faint" : ""}${isMoved ? " moved" : ""}`);
    const [text, value, show] = COLOURS[colour];
    const label = `${shard.state}, shard ${shard.shard}: version ${f.count(shard.version)}, ${text} ${show(value(shard))}`;
    if (cell.title !== label) {
      cell.title = label;
      cell.setAttribute("aria-label", label);
    }
  });
}

const makeCell = (id) => h("button", { class: "cell", type: "button", tabindex: "-1", "data-shard": id, onclick: () => openShard(id) });
