// What happened, newest first.
import { h, keyed, setText } from "./dom.js";
import * as f from "./format.js";
import { fleet } from "./feed.js";

const KINDS = { move: "moves", recovery: "recoveries", fence: "fences", slow: "slow commits", maintenance: "maintenance", query: "queries", actor: "store actors", coordinator: "coordinator" };

export function eventsView() {
  let kind = "";
  let onlyBad = false;
  const choose = h("select", { onchange: () => ((kind = choose.value), update()) }, h("option", { value: "" }, "all"),
    Object.entries(KINDS).map(([value, text]) => h("option", { value }, text)));
  const bad = h("input", { type: "checkbox", onchange: () => ((onlyBad = bad.checked), update()) });
  const list = h("ol", { class: "log" });
  const empty = h("p", { class: "empty" });
  const element = h("section", { class: "card", "aria-labelledby": "events-title" }, h("div", { class: "head" }, h("h2", { id: "events-title" }, "Events"),
    h("div", { class: "controls" }, h("label", {}, "show", choose), h("label", {}, bad, "trouble only"))), empty, list);

  function update() {
    const shown = fleet.events.filter((event) => (!kind || event.kind === kind) && (!onlyBad || event.is_bad)).reverse();
    empty.hidden = shown.length > 0;
    setText(empty, fleet.events.length ? "Nothing of this kind." : "Nothing has happened since the dashboard started: no move, no loss, no refusal.");
    const by = new Map(shown.map((event) => [event.id, event]));
    keyed(list, [...by.keys()], (id) => makeEvent(by.get(id)));
  }
  return { element, update, uses: ["events"] };
}

function makeEvent(event) {
  const of = event.state === null ? null : h("a", { href: `#/queries/${encodeURIComponent(event.state)}` }, event.shard === null ? event.state : `${event.state}, shard ${event.shard}`);
  return h("li", { class: event.is_bad ? "bad-event" : null }, h("time", { title: f.moment(event.at_ms) }, f.clock(event.at_ms)),
    h("span", { class: "kind" }, event.kind), h("span", { class: "text" }, of, of ? ": " : "", event.text));
}
