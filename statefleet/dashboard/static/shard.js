// One shard in a dialog: where it is and why, what it holds, its files, its hottest keys.
import { h } from "./dom.js";
import * as f from "./format.js";
import { ask, now } from "./feed.js";

const dialog = () => document.getElementById("shard");

export async function openShard(id) {
  const place = id.lastIndexOf("/");
  const [state, number] = [id.slice(0, place), id.slice(place + 1)];
  const box = dialog();
  const body = h("div", { "aria-live": "polite" }, h("p", { class: "empty" }, "Asking …"));
  const close = h("button", { type: "button", onclick: () => box.close() }, "Close");
  box.replaceChildren(
    h("div", { class: "head controls" }, h("h1", { id: "shard-title" }, `${state}, shard ${number}`)), body,
    h("div", { class: "buttons" }, h("a", { href: `#/queries/${encodeURIComponent(state)}`, onclick: () => box.close() }, "its query"), close));
  if (!box.open) box.showModal();
  try {
    const path = `api/shards/${encodeURIComponent(state)}/${number}`;
    const told = await ask(path);
    const keys = h("div", {}, h("p", { class: "soft" }, "Asking which keys are the hottest …"));
    body.replaceChildren(...facts(told), keys, ...moves(told));
    keys.replaceChildren(...await ask(`${path}/keys`).then(hottest, (error) => [h("p", { class: "bad" }, error.message)]));
  } catch (error) {
    body.replaceChildren(h("p", { class: "bad" }, error.message));
  }
}

function facts(told) {
  const misses = Object.entries(told.operations_elsewhere ?? {}).map(([why, times]) => `${f.count(times)}: ${why}`);
  const pairs = [
    ["Store actor", f.actorName(told.actor_name)], ["Node", f.shortId(told.node_id)], ["Spark executor, newest batch", told.executor || f.unknown],
    ["Version", `${f.count(told.version)}, can be read from ${f.count(told.oldest_version)}`], ["Epoch", f.count(told.epoch)],
    ["Newest commit", told.last_commit_ms === null ? f.unknown : f.ago(told.last_commit_ms, now())],
    ["State", `${f.plural(told.state_rows, "row")}, ${f.bytes(told.state_bytes)}`], ["Rows in the newest batch", f.count(told.rows_in)],
    ["Apply and write", `${f.duration(told.apply_ms)} and ${f.duration(told.write_ms)}`],
    ["Files", `${f.plural(told.delta_files, "delta")}, ${f.plural(told.snapshot_files, "snapshot file")}, ${f.bytes(told.file_bytes)}`],
    ["Newest snapshot", told.snapshot_version === null ? "none yet" : `of version ${f.count(told.snapshot_version)}`],
    ["State operations at the shard", `${f.count(told.operations_local)} of ${f.count(told.operations)}`],
    ["Elsewhere, and why", misses.join("; ") || "none"],
  ];
  return [h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))];
}

function hottest(told) {
  const rows = [["rows of batches", told.batches], ["look-ups", told.look_ups]].flatMap(([kind, keys]) => keys.map((one) => [kind, one]));
  if (!rows.length) return [h("p", { class: "soft" }, "No key stood out lately.")];
  return [h("h2", {}, "Hottest keys, lately"), h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["key", "of", "at least"].map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, rows.map(([kind, one]) => h("tr", {}, h("td", { class: "wrap" }, keyText(one.key)), h("td", {}, kind),
      h("td", { class: "num" }, f.percent(one.share)))))))];
}

const keyText = (key) => Object.entries(key).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");

function moves(told) {
  const rows = [...told.moves].reverse();
  if (!rows.length) return [h("p", { class: "soft" }, "The log tells of no move.")];
  return [h("h2", {}, "Why it is there"), h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["epoch", "version", "from", "to", "why"].map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, rows.map((move) => h("tr", {}, h("td", { class: "num" }, f.count(move.epoch)), h("td", { class: "num" }, f.count(move.version)),
      h("td", {}, move.from ? f.actorName(move.from) : "nobody"), h("td", {}, f.actorName(move.to)), h("td", { class: "wrap" }, why(move)))))))];
}

function why(move) {
  if (move.error) return h("span", {}, `${move.reason} – `, h("span", { class: "bad" }, `stayed: ${move.error}`));
  return move.moved_bytes === null ? move.reason : `${move.reason}; ${f.bytes(move.moved_bytes)} from memory in ${f.duration(move.moved_ms)}`;
}

