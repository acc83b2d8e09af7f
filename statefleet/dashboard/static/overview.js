// The first screen: how the fleet is in one sentence, its queries, newest trouble, and where shards are.
import { h, keyed, setClass, setText } from "./dom.js";
import * as f from "./format.js";
import { fleet, now } from "./feed.js";
import { grouped, makeEvent } from "./events.js";
import { mapCard } from "./map.js";

const TROUBLE = 4; // groups of events that are shown
const TROUBLE_MS = 3600000;

export function overviewView() {
  const sentence = h("p", { class: "sentence" });
  const details = h("ul", { class: "findings" });
  const health = h("section", { class: "card health", "aria-labelledby": "health-title", role: "status" }, h("h2", { id: "health-title", class: "skip" }, "Health"), sentence, details);
  const tiles = h("dl", { class: "tiles" });
  const body = h("tbody");
  const head = ["query", "state", "batch", "newest commit", "rows/s", "state rows", "shards"];
  const table = h("table", { class: "cards overview" }, h("thead", {}, h("tr", {}, head.map((text, place) => h("th", { scope: "col", class: place > 1 ? "n" : null }, text)))), body);
  const queries = h("section", { class: "card", "aria-labelledby": "overview-queries" },
    h("div", { class: "head" }, h("h2", { id: "overview-queries" }, "Queries"), h("a", { href: "#/queries" }, "where their time goes")), h("div", { class: "scroll tall" }, table));
  const list = h("ol", { class: "log" });
  const trouble = h("section", { class: "card", "aria-labelledby": "trouble-title" },
    h("div", { class: "head" }, h("h2", { id: "trouble-title" }, "Trouble of the last hour"), h("a", { href: "#/events" }, "all events")), list);
  const map = mapCard();
  const element = h("div", { class: "view" }, health, tiles, queries, trouble, map.element);

  function update() {
    const found = findings();
    setClass(health, `card health ${found.length ? "is-bad" : "is-good"}`);
    setText(sentence, found.length ? `${f.plural(found.length, "thing")} to look at` : wellText());
    keyed(details, found, (text) => h("li", {}, text));
    details.hidden = !found.length;
    drawTiles(tiles);
    drawQueries(body);
    queries.hidden = !Object.keys(fleet.tables.queries).length;
    const bad = grouped(fleet.events.filter((event) => event.is_bad && event.at_ms > now() - TROUBLE_MS)).slice(0, TROUBLE);
    trouble.hidden = !bad.length;
    const by = new Map(bad.map((group) => [group.key, group]));
    keyed(list, [...by.keys()], (key) => makeEvent(by.get(key)));
    map.update();
  }
  return { element, update, uses: ["actors", "executors", "queries", "shards"], ticks: true };
}

// What is wrong now, the worst first.
function findings() {
  const { fleet: about, actors, executors, queries } = fleet.tables;
  const found = [];
  if (about.fleet?.error) found.push(`The coordinator does not answer: ${about.fleet.error}.`);
  for (const [name, query] of Object.entries(queries)) if (query.active && query.running?.is_overdue) found.push(`${query.running.text}.`);
  for (const [name, actor] of Object.entries(actors)) if (!actor.alive) found.push(`Store actor ${f.actorName(name)} is lost; its shards are safe in the object store.`);
  for (const executor of Object.values(executors)) {
    if (!executor.alive && !executor.is_expected && !isReplaced(executor)) found.push(`Executor ${executor.executor_id} on ${executor.host} was lost at ${f.clock(executor.lost_at_ms)} UTC, and no other is there.`);
  }
  return found;
}

const isReplaced = (lost) => Object.values(fleet.tables.executors).some((one) => one.alive && one.host === lost.host);

function wellText() {
  const { actors, executors, queries } = fleet.tables;
  const all = Object.values(queries);
  if (!all.length) return "The fleet is there; no query has used it yet.";
  const running = all.filter((one) => one.active).length;
  const alive = Object.values(executors).filter((one) => one.alive).length;
  const held = Object.keys(actors).length;
  const parts = [running === all.length ? (running === 1 ? "the query runs" : `${every(running)} queries run`) : `${running} of ${f.plural(all.length, "query", "queries")} run`,
    held === 1 ? "the store actor answers" : `${every(held)} store actors answer`];
  if (alive) parts.push(`${f.plural(alive, "executor")} ${alive === 1 ? "works" : "work"}`);
  return `All is well: ${parts.join(", ")}.`;
}

const every = (count) => (count === 2 ? "both" : `all ${count}`);

function drawTiles(tiles) {
  const { actors, executors, queries, shards } = fleet.tables;
  const all = Object.values(queries);
  const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);
  const lost = Object.values(actors).filter((one) => !one.alive).length;
  const gone = Object.values(executors).filter((one) => !one.alive && !one.is_expected).length;
  const local = Object.values(shards).filter((one) => one.locality !== null);
  const figures = {
    "Rows a second": [f.brief(sum(all.filter((one) => one.active), "rows_per_second")), "of running queries"],
    "State": [f.bytes(sum(all, "state_bytes")), `${f.brief(sum(all, "state_rows"))} rows`],
    "Shards": [f.count(Object.keys(shards).length), `of ${f.plural(all.length, "query", "queries")}`],
    "Store actors": [f.count(Object.keys(actors).length - lost), lost ? `${lost} lost` : "all answer", lost],
    "Executors": [Object.keys(executors).length ? f.count(Object.values(executors).filter((one) => one.alive).length) : f.unknown, gone ? `${gone} lost lately` : "of all drivers", gone],
    "Locality": [local.length ? f.percent(sum(local, "locality") / local.length) : f.unknown, "tasks at their shard"],
  };
  keyed(tiles, Object.keys(figures),
    (name) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, h("span"), h("span", { class: "more" }))),
    (tile, name) => {
      const [figure, more] = tile.querySelectorAll("dd span");
      setText(figure, figures[name][0]);
      setText(more, figures[name][1]);
      more.classList.toggle("bad", Boolean(figures[name][2]));
    });
}

export function stateText(query) {
  if (!query.active) return ["stopped", "soft"];
  if (query.running?.is_overdue) return [`batch ${f.count(query.running.batch_id)} runs for ${f.duration(query.running.running_ms)}`, "bad"];
  return query.running ? [`running, batch ${f.count(query.running.batch_id)} for ${f.duration(query.running.running_ms)}`, "good"] : ["running", "good"];
}

function drawQueries(body) {
  const { queries } = fleet.tables;
  const isOverdue = (name) => Boolean(queries[name].running?.is_overdue);
  const names = Object.keys(queries).sort((a, b) => isOverdue(b) - isOverdue(a) || (a < b ? -1 : 1));
  keyed(body, names, (name) => h("tr", {},
    h("td", { class: "name-cell wide" }, h("a", { href: `#/queries/${encodeURIComponent(name)}` }, name)),
    ...["state", "batch", "newest commit", "rows/s", "state rows", "shards"].map((text, place) => h("td", { class: place ? "n" : null, "data-label": text }))),
  (row, name) => {
    const query = queries[name];
    const [text, kind] = stateText(query);
    const values = [text, f.count(query.batch_id), f.ago(query.last_commit_ms, now()), f.brief(query.rows_per_second), f.brief(query.state_rows), f.count(query.num_shards)];
    values.forEach((value, place) => setText(row.cells[place + 1], value));
    setClass(row.cells[1], kind);
    row.cells[1].title = query.running?.text ?? "";
  });
}
