// One shard in a dialog: where it is and why, what it holds, its files.
import { h } from "./dom.js";
import * as f from "./format.js";
import { moveText } from "./events.js";
import { fleet, now } from "./feed.js";

export function openShard(state, number) {
  const shard = fleet.queries[state]?.shards.find((one) => one.partition_id === number);
  if (!shard) return;
  const box = document.getElementById("shard");
  box.replaceChildren(h("div", { class: "head controls" }, h("h1", { id: "shard-title" }, `${state}, shard ${number}`)), facts(shard), ...moves(shard.moves),
    h("div", { class: "buttons" }, h("a", { href: `#/queries/${encodeURIComponent(state)}`, onclick: () => box.close() }, "its query"),
      h("button", { type: "button", onclick: () => box.close() }, "Close")));
  box.showModal();
}

function facts(shard) {
  const misses = Object.entries(shard.operations_elsewhere).map(([why, times]) => `${f.count(times)}: ${why}`);
  const pairs = [
    ["Store actor", f.actorName(shard.actor_name)], ["Node", f.shortId(shard.node_id)], ["Spark executor, newest batch", shard.executor || f.unknown],
    ["Version", `${f.count(shard.version)}, can be read from ${f.count(shard.oldest_version)}`], ["Epoch", f.count(shard.epoch)],
    ["Newest commit", f.ago(shard.last_commit_ms, now())],
    ["State", `${f.plural(shard.state_rows, "row")}, ${f.bytes(shard.state_bytes)}`], ["Rows in the newest batch", f.count(shard.rows_in)],
    ["Apply and write", `${f.duration(shard.apply_ms)} and ${f.duration(shard.write_ms)}`],
    ["Files", `${f.plural(shard.delta_files, "delta")}, ${f.plural(shard.snapshot_files, "snapshot file")}, ${f.bytes(shard.file_bytes)}`],
    ["Newest snapshot", shard.snapshot_version === null ? "none yet" : `of version ${f.count(shard.snapshot_version)}`],
    ["State operations at the shard", `${f.count(shard.operations_local)} of ${f.count(shard.operations)}`],
    ["Elsewhere, and why", misses.join("; ") || "none"],
  ];
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function moves(told) {
  if (!told.length) return [h("p", { class: "soft" }, "The log tells of no move.")];
  return [h("h2", {}, "Why it is there"), h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["epoch", "version", "from", "to", "why"].map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, [...told].reverse().map((move) => h("tr", {}, h("td", { class: "num" }, f.count(move.epoch)), h("td", { class: "num" }, f.count(move.version)),
      h("td", {}, move.from ? f.actorName(move.from) : "nobody"), h("td", {}, f.actorName(move.to)), h("td", { class: "wrap" }, moveText(move)))))))];
}
