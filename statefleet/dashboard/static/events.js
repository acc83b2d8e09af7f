// What happened, newest first; what one cause did to several shards is one row.
import { h, keyed, setText } from "./dom.js";
import * as f from "./format.js";
import { fleet } from "./feed.js";

const KINDS = { move: "moves", recovery: "recoveries", fence: "fences", slow: "slow batches", maintenance: "maintenance", query: "queries", actor: "store actors", executor: "executors", coordinator: "coordinator" };
const TOGETHER_MS = 60000;
const SHARDS_NAMED = 12;

// Groups of events, newest first: of one cause, each within a minute of the next.
export function grouped(events) {
  const groups = [];
  const open = new Map();
  for (const event of [...events].reverse()) {
    const key = `${event.kind}|${event.is_bad}|${event.cause}`;
    const group = event.cause ? open.get(key) : undefined;
    if (group && Math.abs(group.first.at_ms - event.at_ms) < TOGETHER_MS) {
      group.events.push(event);
      group.first = event;
      group.key = `${group.newest.id}-${event.id}`;
    } else {
      const made = { key: `${event.id}`, newest: event, first: event, events: [event] };
      groups.push(made);
      if (event.cause) open.set(key, made);
    }
  }
  return groups;
}

export function eventsView() {
  let kind = "all";
  let onlyBad = false;
  const choose = h("select", { onchange: () => ((kind = choose.value), update()) }, h("option", { value: "all" }, "all but maintenance"),
    Object.entries(KINDS).map(([value, text]) => h("option", { value }, text)));
  const bad = h("input", { type: "checkbox", onchange: () => ((onlyBad = bad.checked), update()) });
  const list = h("ol", { class: "log" });
  const empty = h("p", { class: "empty" });
  const element = h("section", { class: "card", "aria-labelledby": "events-title" }, h("div", { class: "head" }, h("h2", { id: "events-title" }, "Events"),
    h("span", { class: "soft small" }, "Times are UTC."), h("div", { class: "controls" }, h("label", {}, "show", choose), h("label", {}, bad, "trouble only"))), empty, list);

  function update() {
    const chosen = (event) => (kind === "all" ? event.kind !== "maintenance" : event.kind === kind);
    const groups = grouped(fleet.events.filter((event) => chosen(event) && (!onlyBad || event.is_bad)));
    empty.hidden = groups.length > 0;
    setText(empty, fleet.events.length ? "Nothing of this kind." : "Nothing has happened since the dashboard started: no move, no loss, no refusal.");
    const by = new Map(groups.map((group) => [group.key, group]));
    keyed(list, [...by.keys()], (key) => makeEvent(by.get(key)));
  }
  return { element, update, uses: ["events"] };
}

export function makeEvent({ newest, events }) {
  const numbers = [...new Set(events.map((event) => event.shard).filter((shard) => shard !== null))].sort((a, b) => a - b);
  const shards = numbers.length === 0 ? "" : numbers.length === 1 ? `, shard ${numbers[0]}`
    : `, ${numbers.length} shards (${numbers.slice(0, SHARDS_NAMED).join(", ")}${numbers.length > SHARDS_NAMED ? ", …" : ""})`;
  const of = newest.state === null ? null : h("a", { href: `#/queries/${encodeURIComponent(newest.state)}` }, `${newest.state}${shards}`);
  const times = events.length > 1 ? h("details", {}, h("summary", {}, `${events.length} times`), h("ul", {}, events.map((event) => h("li", { class: "plain" }, `${f.clock(event.at_ms)}${event.shard === null ? "" : `, shard ${event.shard}`}: ${event.text}`)))) : null;
  // Of several that differ, what they have in common.
  const text = new Set(events.map((event) => event.text)).size > 1 ? newest.cause.slice(newest.cause.indexOf(": ") + 2) : newest.text;
  return h("li", { class: newest.is_bad ? "bad-event" : null }, h("time", { title: f.moment(newest.at_ms) }, f.day(newest.at_ms), h("br"), f.clock(newest.at_ms)),
    h("span", { class: "kind" }, newest.kind), h("span", { class: "text" }, of, of ? ": " : "", text, times));
}
