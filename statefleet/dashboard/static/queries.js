// All queries, one a row.
import { h, keyed, setText } from "./dom.js";
import * as f from "./format.js";
import { fleet, now } from "./feed.js";
import { stateText } from "./overview.js";
import { bar, legend, total } from "./bars.js";

const lag = (query) => (query.watermark_ms === null || !query.watermark_ms ? null : Math.max(0, now() - query.watermark_ms));
const COLUMNS = [
  ["name", "query", "wide", (query) => query.name],
  ["active", "status", "", (query) => stateText(query)[0]],
  ["batch_id", "batch", "n", (query) => f.count(query.batch_id)],
  ["rows_per_second", "rows/s", "n", (query) => f.brief(query.rows_per_second)],
  ["state_rows", "state rows", "n", (query) => f.brief(query.state_rows)],
  ["state_bytes", "state bytes", "n", (query) => f.bytes(query.state_bytes)],
  ["lag", "behind by event time", "n", (query) => f.duration(lag(query))],
  ["last_commit_ms", "newest commit", "n", (query) => f.ago(query.last_commit_ms, now())],
  ["locality", "locality", "n", (query) => f.percent(query.locality)],
  ["num_shards", "shards", "n", (query) => f.count(query.num_shards)],
];

export function newestBatches() {
  const found = new Map();
  for (const batch of Object.values(fleet.tables.batches)) {
    const query = fleet.tables.queries[batch.state];
    if (query && batch.shards_counted === query.num_shards && batch.version > (found.get(batch.state)?.version ?? 0)) found.set(batch.state, batch);
  }
  return found;
}

export function queriesView() {
  let order = "name";
  let isUp = true;
  const heads = COLUMNS.map(([name, text, kind]) => h("th", { scope: "col", class: kind === "n" ? "n" : null, "data-column": name },
    h("button", { type: "button", onclick: () => ((isUp = order === name ? !isUp : name === "name"), (order = name), update()) }, text)));
  const body = h("tbody");
  const empty = h("p", { class: "empty", hidden: true }, "No query has used this fleet yet. One that has shows here with its first batch.");
  const table = h("table", { class: "cards" }, h("thead", {}, h("tr", {}, heads, h("th", { scope: "col" }, "where the newest batch's time went"))), body);
  const element = h("section", { class: "card", "aria-labelledby": "queries-title" },
    h("div", { class: "head" }, h("h2", { id: "queries-title" }, "Queries"), legend()), empty, h("div", { class: "scroll" }, table));

  function value(query) {
    if (order === "lag") return lag(query) ?? -1;
    return query[order] ?? -1;
  }
  function update() {
    const { queries } = fleet.tables;
    const names = Object.keys(queries).sort((a, b) => {
      const [left, right] = [value(queries[a]), value(queries[b])];
      return (left < right ? -1 : left > right ? 1 : a < b ? -1 : 1) * (isUp ? 1 : -1);
    });
    for (const head of heads) {
      if (head.dataset.column === order) head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    empty.hidden = names.length > 0;
    table.hidden = !names.length;
    const batches = newestBatches();
    keyed(body, names, makeRow, (row, name) => {
      const query = queries[name];
      COLUMNS.forEach(([column, , , show], place) => {
        const cell = row.cells[place];
        setText(column === "name" ? cell.firstChild : cell, show(query));
        if (column === "active") {
          cell.className = stateText(query)[1];
          cell.title = query.running?.text ?? "";
        }
        if (column === "lag") cell.title = `watermark ${f.moment(query.watermark_ms || null)}`;
      });
      const batch = batches.get(name);
      const [strip, text] = row.cells[COLUMNS.length].children;
      bar(strip, batch, batch ? total(batch) : 0);
      setText(text, batch ? f.duration(total(batch)) : "not known yet");
    });
  }
  return { element, update, uses: ["queries", "batches"], ticks: true };
}

function makeRow(name) {
  const cells = COLUMNS.map(([column, text, kind]) => column === "name"
    ? h("td", { class: "name-cell wide" }, h("a", { href: `#/queries/${encodeURIComponent(name)}` }))
    : h("td", { class: kind || null, "data-label": text }));
  return h("tr", {}, cells, h("td", { class: "wide" }, h("div", { class: "bar" }), h("span", { class: "soft small num" })));
}
