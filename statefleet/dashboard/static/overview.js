// The first screen: how the fleet is in one sentence, its queries, newest trouble, and where shards are.
import { h, keyed, setClass, setText } from "./dom.js";
import * as f from "./format.js";
import { bar, legend, total } from "./bars.js";
import { drawEvents, events } from "./events.js";
import { allShards, fleet, now } from "./feed.js";
import { isReplaced, mapCard } from "./map.js";

const TROUBLE = 4; // events that are shown
const TROUBLE_MS = 3600000;

export function overviewView() {
  const sentence = h("p", { class: "sentence" });
  const details = h("ul", { class: "findings" });
  const health = h("section", { class: "card health", "aria-labelledby": "health-title", role: "status" }, h("h2", { id: "health-title", class: "skip" }, "Health"), sentence, details);
  const tiles = h("dl", { class: "tiles" });
  const queries = queriesCard();
  const list = h("ol", { class: "log" });
  const trouble = h("section", { class: "card", "aria-labelledby": "trouble-title" },
    h("div", { class: "head" }, h("h2", { id: "trouble-title" }, "Trouble of the last hour"), h("a", { href: "#/events" }, "all events")), list);
  const map = mapCard();
  const element = h("div", { class: "view" }, health, tiles, queries.element, trouble, map.element);

  function update() {
    const found = findings();
    setClass(health, `card health ${found.length ? "is-bad" : "is-good"}`);
    setText(sentence, found.length ? `${f.plural(found.length, "thing")} to look at` : wellText());
    keyed(details, found, (text) => h("li", {}, text));
    details.hidden = !found.length;
    drawTiles(tiles);
    queries.update();
    const bad = events().filter((event) => event.isBad && event.at > now() - TROUBLE_MS).slice(0, TROUBLE);
    trouble.hidden = !bad.length;
    drawEvents(list, bad);
    map.update();
  }
  return { element, update };
}

// What is wrong now, the worst first.
function findings() {
  const found = [];
  if (fleet.error) found.push(`The coordinator does not answer: ${fleet.error}.`);
  for (const query of Object.values(fleet.queries)) if (query.active && query.running?.is_overdue) found.push(`${query.running.text}.`);
  for (const [name, actor] of Object.entries(fleet.actors)) if (!actor.alive) found.push(`Store actor ${f.actorName(name)} is lost; its shards are safe in the object store.`);
  for (const executor of fleet.executors) {
    if (!executor.alive && !executor.is_expected && !isReplaced(executor)) found.push(`Executor ${executor.executor_id} on ${executor.host} was lost at ${f.clock(executor.lost_at_ms)} UTC, and no other is there.`);
  }
  return found;
}

function wellText() {
  const all = Object.values(fleet.queries);
  if (!all.length) return "The fleet is there; no query has used it yet.";
  const running = all.filter((one) => one.active).length;
  const alive = fleet.executors.filter((one) => one.alive).length;
  const held = Object.keys(fleet.actors).length;
  const parts = [running === all.length ? (running === 1 ? "the query runs" : `${every(running)} queries run`) : `${running} of ${f.plural(all.length, "query", "queries")} run`,
    held === 1 ? "the store actor answers" : `${every(held)} store actors answer`];
  if (alive) parts.push(`${f.plural(alive, "executor")} ${alive === 1 ? "works" : "work"}`);
  return `All is well: ${parts.join(", ")}.`;
}

const every = (count) => (count === 2 ? "both" : `all ${count}`);

function drawTiles(tiles) {
  const all = Object.values(fleet.queries);
  const actors = Object.values(fleet.actors);
  const shards = allShards();
  const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);
  const lost = actors.filter((one) => !one.alive).length;
  const gone = fleet.executors.filter((one) => !one.alive && !one.is_expected).length;
  const local = shards.filter((one) => one.locality !== null);
  const figures = {
    "Rows a second": [f.brief(sum(all.filter((one) => one.active), "rows_per_second")), "of running queries"],
    "State": [f.bytes(sum(all, "state_bytes")), `${f.brief(sum(all, "state_rows"))} rows`],
    "Shards": [f.count(shards.length), `of ${f.plural(all.length, "query", "queries")}`],
    "Store actors": [f.count(actors.length - lost), lost ? `${lost} lost` : "all answer", lost],
    "Executors": [fleet.executors.length ? f.count(fleet.executors.filter((one) => one.alive).length) : f.unknown, gone ? `${gone} lost lately` : "of all drivers", gone],
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
  if (query.is_continuous) return [`runs continuously, rows wait ${f.duration(query.batches.findLast((one) => one.waited_ms !== null)?.waited_ms)} at most`, "good"];
  return query.running ? [`running, batch ${f.count(query.running.batch_id)} for ${f.duration(query.running.running_ms)}`, "good"] : ["running", "good"];
}

// -- queries

const lag = (query) => (query.watermark_ms ? Math.max(0, now() - query.watermark_ms) : null);
const COLUMNS = [
  ["query", (query) => query.name],
  ["state", (query) => stateText(query)[0]],
  ["batch", (query) => f.count(query.batch_id), (query) => query.batch_id],
  ["newest commit", (query) => f.ago(query.last_commit_ms, now()), (query) => query.last_commit_ms],
  ["rows/s", (query) => f.brief(query.rows_per_second), (query) => query.rows_per_second],
  ["state rows", (query) => f.brief(query.state_rows), (query) => query.state_rows],
  ["state bytes", (query) => f.bytes(query.state_bytes), (query) => query.state_bytes],
  ["behind by event time", (query) => f.duration(lag(query)), lag],
  ["shards", (query) => f.count(query.num_shards), (query) => query.num_shards],
];

function queriesCard() {
  let order = 0;
  let isUp = true;
  const heads = COLUMNS.map(([text, , number], place) => h("th", { scope: "col", class: number ? "n" : null },
    h("button", { type: "button", onclick: () => ((isUp = order === place ? !isUp : place < 2), (order = place), update()) }, text)));
  const body = h("tbody");
  const table = h("table", { class: "cards overview" }, h("thead", {}, h("tr", {}, heads, h("th", { scope: "col" }, "where the newest batch's time went"))), body);
  const element = h("section", { class: "card", "aria-labelledby": "queries-title" },
    h("div", { class: "head" }, h("h2", { id: "queries-title" }, "Queries"), legend()), h("div", { class: "scroll tall" }, table));

  function update() {
    const { queries } = fleet;
    const [, show, number] = COLUMNS[order];
    const value = (query) => (number ? number(query) ?? -1 : show(query));
    const isOverdue = (query) => Boolean(query.running?.is_overdue);
    const rows = Object.values(queries).sort((a, b) => isOverdue(b) - isOverdue(a)
      || (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.name < b.name ? -1 : 1) * (isUp ? 1 : -1));
    heads.forEach((head, place) => (place === order ? head.setAttribute("aria-sort", isUp ? "ascending" : "descending") : head.removeAttribute("aria-sort")));
    element.hidden = !rows.length;
    keyed(body, rows.map((query) => query.name), makeRow, (row, name) => {
      const query = queries[name];
      COLUMNS.forEach(([, text], place) => place && setText(row.cells[place], text(query)));
      setClass(row.cells[1], stateText(query)[1]);
      row.cells[1].title = query.running?.text ?? "";
      const batch = query.batches.findLast((one) => one.shards_counted === query.num_shards);
      const [strip, text] = row.cells[COLUMNS.length].children;
      bar(strip, batch, batch ? total(batch) : 0);
      setText(text, batch ? f.duration(total(batch)) : "not known yet");
    });
  }
  return { element, update };
}

function makeRow(name) {
  const link = h("a", { href: `#/queries/${encodeURIComponent(name)}` }, name);
  const cells = COLUMNS.slice(1).map(([text, , number]) => h("td", { class: number ? "n" : null, "data-label": text }));
  return h("tr", {}, h("td", { class: "name-cell wide" }, link), cells, h("td", { class: "wide" }, h("div", { class: "bar" }), h("span", { class: "soft small num" })));
}
