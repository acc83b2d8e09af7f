// One query: figures, charts, where the time of its batches goes, its shards.
/* global uPlot */
import { h, keyed, setText } from "./dom.js";
import * as f from "./format.js";
import { drawEvents, events } from "./events.js";
import { fleet, now } from "./feed.js";
import { stateText } from "./overview.js";
import { bar, legend, total } from "./bars.js";
import { openShard } from "./shard.js";

const SHOWN = 15; // batches of the timeline
const LONGEST = 4; // times the median that the longest bar shows

export function queryView(name) {
  const title = h("h1", {}, name);
  const facts = h("dl", { class: "facts" });
  const gone = h("p", { class: "empty", hidden: true }, "The fleet has no such query. It may have been removed, or nothing was committed yet.");
  const overdue = h("p", { class: "bad", role: "status", hidden: true });
  const charts = [
    chart("Rows a second", "s1", f.brief, (batch, before) => rate(batch, before)),
    chart("Time of a batch", "s2", f.duration, (batch) => (batch.planned_ms === null ? null : total(batch)), (query) => !query.is_continuous),
    chart("Longest wait of a row", "s2", f.duration, (batch) => batch.waited_ms, (query) => query.is_continuous),
    chart("State rows", "s3", f.brief, (batch) => batch.state_rows),
    chart("State bytes", "s4", f.bytes, (batch) => batch.state_bytes),
    chart("Behind by event time", "s5", f.duration, (batch) => (batch.watermark_ms > 0 ? at(batch) - batch.watermark_ms : null), (query) => query.watermark_ms !== null),
    chart("Late rows", "s6", f.count, (batch) => batch.rows_late, (query) => query.watermark_ms !== null),
  ];
  const newest = h("h2", { class: "head" });
  const time = h("h2", { id: "time-title" });
  const timeline = h("div", { class: "timeline" });
  const list = h("ol", { class: "log" });
  const happened = h("section", { class: "card", "aria-labelledby": "happened-title" }, h("h2", { class: "head", id: "happened-title" }, "Slow batches and refusals"), list);
  const body = h("tbody");
  const head = ["shard", "store actor", "executor", "version", "epoch", "rows", "bytes", "rows in", "apply", "write", "locality"];
  const rest = h("div", { class: "view" },
    h("section", { class: "card" }, newest, h("div", { class: "charts" }, charts.map((one) => one.element))),
    h("section", { class: "card", "aria-labelledby": "time-title" },
      h("div", { class: "head" }, time, legend()), timeline,
      h("p", { class: "soft small" }, "Of the shard that was counted last, which the others were waited for with. Spark's part and the exchange cannot be told apart from here; commits before the coordinator started have no times.")),
    happened,
    h("section", { class: "card" }, h("h2", { class: "head" }, "Shards"), h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, head.map((text, place) => h("th", { scope: "col", class: place > 2 ? "n" : null }, text)))), body))));
  const element = h("div", { class: "view" }, h("section", { class: "card" }, h("div", { class: "head" }, title,
    h("div", { class: "controls" }, h("a", { href: `#/state/${encodeURIComponent(name)}` }, "look up a key"), h("a", { href: "#/" }, "all queries"))), gone, overdue, facts), rest);

  function update() {
    const query = fleet.queries[name];
    gone.hidden = Boolean(query);
    rest.hidden = facts.hidden = !query;
    if (!query) return;
    overdue.hidden = !query.running?.is_overdue;
    setText(overdue, query.running?.text ?? "");
    drawFacts(facts, query);
    setText(newest, query.is_continuous ? "Newest epochs" : "Newest batches");
    setText(time, query.is_continuous ? "Where the time of an epoch goes after its last row" : "Where the time of a batch goes");
    const whole = query.batches.filter((batch) => batch.shards_counted === query.num_shards);
    for (const one of charts) one.draw(whole, query);
    drawTimeline(timeline, query.batches.slice(-SHOWN).reverse(), query);
    const rows = events(name);
    happened.hidden = !rows.length;
    drawEvents(list, rows);
    drawShards(body, query.shards);
  }
  return { element, update, close: () => charts.forEach((one) => one.close()) };
}

const at = (batch) => batch.planned_ms ?? batch.first_begun_ms;

function rate(batch, before) {
  if (before?.version !== batch.version - 1) return null;
  const ms = at(batch) - at(before);
  return ms > 0 ? (batch.rows_in * 1000) / Math.max(ms, 1) : null;
}

function drawFacts(facts, query) {
  const watermark = query.watermark_ms || null;
  const pairs = {
    "State": stateText(query)[0],
    [query.is_continuous ? "Epoch, version" : "Batch, version"]: `${f.count(query.batch_id)}, ${f.count(query.version)}`,
    "Rows a second": f.count(query.rows_per_second),
    "State rows": f.count(query.state_rows),
    "State bytes": f.bytes(query.state_bytes),
    "Watermark": watermark ? `${f.moment(watermark)}, ${f.duration(Math.max(0, now() - watermark))} behind` : "none yet, or the operator has none",
    "Behind in Kafka": query.behind_records === null ? "unknown: the source is another, or has said nothing yet" : `${f.plural(query.behind_records, "record")} at most of a partition`,
    "Newest commit": f.ago(query.last_commit_ms, now()),
    "Late rows": f.count(query.rows_late),
    "Tasks at their shard": f.percent(query.locality),
    "Shards": f.count(query.num_shards),
    "Output mode": query.output_mode,
    "Run": query.run_id ? query.run_id.slice(0, 8) : f.unknown,
  };
  keyed(facts, Object.keys(pairs), (key) => h("div", {}, h("dt", {}, key), h("dd", { class: "num" })), (pair, key) => setText(pair.lastChild, pairs[key]));
}

// `applies` says of which queries there is such a chart.
function chart(text, id, show, value, applies = () => true) {
  const newest = h("span", { class: "num" });
  const plot = h("div", { class: "plot" });
  const element = h("figure", { class: "chart", role: "img" }, h("figcaption", { class: "head small" }, h("span", { class: "soft" }, text), newest), plot);
  let drawn = null;
  let theme = "";
  const size = new ResizeObserver(() => drawn?.setSize({ width: plot.clientWidth, height: 168 }));
  size.observe(plot);

  function draw(batches, query) {
    element.hidden = !applies(query);
    if (element.hidden) return;
    const points = batches.map((batch, place) => [at(batch) / 1000, value(batch, batches[place - 1])]).filter(([, one]) => one !== null);
    setText(newest, points.length ? show(points[points.length - 1][1]) : "nothing yet");
    element.setAttribute("aria-label", `${text}: ${newest.textContent}`);
    const data = [points.map(([x]) => x), points.map(([, y]) => y)];
    const wanted = document.documentElement.dataset.theme;
    if (drawn && theme === wanted) {
      drawn.setData(data);
      return;
    }
    drawn?.destroy();
    theme = wanted;
    const style = getComputedStyle(document.documentElement);
    const [line, grid, soft] = ["--accent", "--line", "--soft"].map((one) => style.getPropertyValue(one).trim());
    const axis = { stroke: soft, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    drawn = new uPlot({
      width: plot.clientWidth || 300, height: 168, legend: { show: false }, cursor: { y: false, drag: { setScale: false } },
      scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), (high ?? 0) > 0 ? Math.max(high * 1.1, 4) : 4] } },
      axes: [{ ...axis, size: 24, space: 80, values: (_, ticks) => ticks.map((s) => f.clock(s * 1000)) }, { ...axis, size: 62, values: (_, ticks) => ticks.map(show) }],
      series: [{}, { stroke: line, width: 1.6, fill: `${line}22`, points: { show: points.length < 4 } }],
    }, data, plot);
  }
  return { element, draw, close: () => { size.disconnect(); drawn?.destroy(); } };
}

function drawTimeline(timeline, batches, query) {
  const totals = batches.map(total).sort((a, b) => a - b);
  // One that took very long, as the first one does, is cut off: it would leave the others no room.
  const largest = Math.max(1, Math.min(totals.at(-1) ?? 1, LONGEST * (totals[totals.length >> 1] ?? 1)));
  if (!batches.length) {
    timeline.known?.clear();
    timeline.replaceChildren(h("p", { class: "empty" }, "No batch was committed yet, or programs write this state without batches."));
    return;
  }
  timeline.querySelector(".empty")?.remove();
  const keys = batches.flatMap((batch) => [`l${batch.version}`, `b${batch.version}`, `t${batch.version}`]);
  const by = new Map(batches.map((batch) => [String(batch.version), batch]));
  keyed(timeline, keys, (key) => (key[0] === "b" ? h("div", { class: "bar" }) : h("span", { class: "num" })), (part, key) => {
    const batch = by.get(key.slice(1));
    if (key[0] === "b") {
      bar(part, batch, largest);
      part.classList.toggle("cut", total(batch) > largest);
    }
    else if (key[0] === "l") setText(part, `${f.count(batch.batch_id)}`);
    else setText(part, batch.shards_counted < query.num_shards ? `${batch.shards_counted} of ${query.num_shards} shards` : `${f.duration(total(batch))} · ${f.plural(batch.rows_in, "row")}`);
  });
}

function drawShards(body, shards) {
  const by = new Map(shards.map((shard) => [shard.partition_id, shard]));
  keyed(body, [...by.keys()], (key) => h("tr", {},
    h("td", {}, h("button", { type: "button", class: "quiet num", "aria-label": `Shard ${key}`, onclick: () => openShard(by.get(key).state, key) }, String(key))),
    h("td", { class: "mono" }), h("td", { class: "mono" }), ...Array.from({ length: 8 }, () => h("td", { class: "n" }))),
  (row, key) => {
    const shard = by.get(key);
    const isLost = shard.actor_name && fleet.actors[shard.actor_name]?.alive === false;
    const values = [isLost ? `${f.actorName(shard.actor_name)} (lost)` : f.actorName(shard.actor_name), shard.executor || f.unknown, f.count(shard.version), f.count(shard.epoch),
      f.count(shard.state_rows), f.bytes(shard.state_bytes), f.count(shard.rows_in), f.duration(shard.apply_ms), f.duration(shard.write_ms), f.percent(shard.locality)];
    values.forEach((text, place) => setText(row.cells[place + 1], text));
    row.cells[1].classList.toggle("bad", Boolean(isLost));
  });
}
