// What the coordinator's record tells: slow batches, refusals, lost executors by time; and the newest moves of shards, by version.
import { h, keyed } from "./dom.js";
import * as f from "./format.js";
import { allShards, fleet } from "./feed.js";

const NAMED = 12; // shards that a row names
const VALUES = / \(|; |, /; // the end of a refusal's first part, before its values

// Newest first; refusals of one kind with the same cause are one event.
export function events(state = null) {
  const found = new Map();
  const add = (key, event) => {
    const other = found.get(key);
    found.set(key, { ...(other && other.at > event.at ? other : event), times: (other?.times ?? 0) + 1 });
  };
  for (const [name, query] of Object.entries(fleet.queries)) {
    if (state !== null && name !== state) continue;
    for (const batch of query.slow_batches) add(`${name}/${batch.number}`, { at: batch.at_ms, kind: "slow batch", state: name, text: batch.text, isBad: true });
    for (const refusal of query.refusals) {
      const text = `${refusal.kind}: ${refusal.text}`;
      add(`${name}/${text.split(VALUES)[0]}`, { at: refusal.at_ms, kind: refusal.kind === "FencedError" ? "fence" : "refusal", state: name, text: `shard ${refusal.shard}: ${text}`, isBad: true });
    }
  }
  for (const one of state === null ? fleet.executors.filter((executor) => !executor.alive) : []) {
    const text = `executor ${one.executor_id} on ${one.host} was ${one.is_expected ? "ended" : "lost"}${one.reason ? `: ${one.reason}` : ""}`;
    add(`${one.application} ${one.executor_id}`, { at: one.lost_at_ms, kind: "executor", state: null, text, isBad: !one.is_expected });
  }
  return [...found].map(([key, event]) => ({ ...event, key: `${key}/${event.at}/${event.times}` })).sort((a, b) => b.at - a.at);
}

export function drawEvents(list, rows) {
  const by = new Map(rows.map((event) => [event.key, event]));
  keyed(list, [...by.keys()], (key) => {
    const { at, kind, state, text, times, isBad } = by.get(key);
    return h("li", { class: isBad ? "bad-event" : null }, h("time", { title: f.moment(at) }, f.day(at), h("br"), f.clock(at)), h("span", { class: "kind" }, kind),
      h("span", { class: "text" }, state === null ? null : h("a", { href: `#/queries/${encodeURIComponent(state)}` }, state), state === null ? null : ": ", text, times > 1 ? ` (${f.count(times)} of this kind)` : null));
  });
}

// Moves of a state between the same store actors for the same reason are one row. The first placement of a shard is no move.
function moves() {
  const found = new Map();
  for (const shard of allShards()) {
    for (const move of shard.moves.filter((one) => one.from !== null)) {
      const key = [shard.state, move.from, move.to, move.reason, move.error].join("|");
      const row = found.get(key) ?? { ...move, state: shard.state, shards: new Set() };
      row.version = Math.max(row.version, move.version);
      found.set(key, row);
      row.shards.add(shard.partition_id);
    }
  }
  return [...found.values()].sort((a, b) => (a.state < b.state ? -1 : a.state > b.state ? 1 : b.version - a.version));
}

export function moveText(move) {
  if (move.error) return [`${move.reason} – `, h("span", { class: "bad" }, `stayed: ${move.error}`)];
  return [move.moved_bytes === null ? move.reason : `${move.reason}; ${f.bytes(move.moved_bytes)} from memory in ${f.duration(move.moved_ms)}`];
}

const shardsText = (shards) => `${shards.slice(0, NAMED).join(", ")}${shards.length > NAMED ? `, … (${shards.length})` : ""}`;

const makeMove = (move) => h("tr", {}, h("td", {}, move.state), h("td", {}, shardsText([...move.shards])), h("td", { class: "num" }, f.count(move.version)), h("td", {}, f.actorName(move.from)),
  h("td", {}, move.from === move.to ? "its restart" : f.actorName(move.to)), h("td", { class: "wrap" }, moveText(move)));

export function eventsView() {
  const list = h("ol", { class: "log" });
  const empty = h("p", { class: "empty" }, "Nothing has happened since the coordinator started: no slow batch, no refusal, no lost executor.");
  const body = h("tbody");
  const moved = h("section", { class: "card", "aria-labelledby": "moves-title" }, h("h2", { class: "head", id: "moves-title" }, "Newest moves of shards"), h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["query", "shards", "version", "from", "to", "why"].map((text) => h("th", { scope: "col" }, text)))), body)));
  const element = h("div", { class: "view" }, h("section", { class: "card", "aria-labelledby": "events-title" },
    h("div", { class: "head" }, h("h2", { id: "events-title" }, "Events"), h("span", { class: "soft small" }, "Times are UTC.")), empty, list), moved);

  function update() {
    const rows = events();
    empty.hidden = rows.length > 0;
    drawEvents(list, rows);
    const by = new Map(moves().map((move) => [[move.state, move.from, move.to, move.reason, move.error, move.version, move.shards.size].join("|"), move]));
    moved.hidden = !by.size;
    keyed(body, [...by.keys()], (key) => makeMove(by.get(key)));
  }
  return { element, update };
}
