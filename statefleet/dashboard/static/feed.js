// What the server tells: rows by table and id, and events. One stream of server-sent events, which connects again by itself.

const QUIET_MS = 25000; // two heartbeats that did not come

export const fleet = { tables: { fleet: {}, actors: {}, executors: {}, queries: {}, shards: {}, batches: {} }, events: [], clockMs: 0, seen: false };

const listeners = new Set();
let source = null;
let heardAt = 0;
let failures = 0;
let onState = () => {};

export const listen = (listener) => listeners.add(listener);
export const now = () => Date.now() + fleet.clockMs;

export function connect(state) {
  onState = state;
  open();
  setInterval(() => {
    if (source && Date.now() - heardAt > QUIET_MS) again("no word from the dashboard");
  }, 5000);
}

function open() {
  heardAt = Date.now();
  source = new EventSource("api/stream");
  source.addEventListener("view", (event) => take(JSON.parse(event.data), true));
  source.addEventListener("change", (event) => take(JSON.parse(event.data), false));
  source.addEventListener("still", () => heard());
  source.onerror = () => again("the dashboard does not answer");
}

function heard() {
  heardAt = Date.now();
  failures = 0;
  onState("on", "live");
}

async function again(why) {
  source.close();
  source = null;
  failures += 1;
  onState("off", why);
  // A stream tells no status: whether the token is not valid any more shows a plain request.
  try {
    const answer = await fetch("style.css", { cache: "no-store" });
    if (answer.status === 401) {
      onState("denied", "the dashboard wants a token");
      return;
    }
  } catch {
    // It is not there; it is tried again.
  }
  setTimeout(open, Math.min(500 * 2 ** failures, 8000));
}

function take(message, isAll) {
  const changed = new Set();
  if (isAll) {
    fleet.tables = { ...Object.fromEntries(Object.keys(fleet.tables).map((name) => [name, {}])), ...message.tables };
    fleet.events = message.events;
    Object.keys(fleet.tables).forEach((name) => changed.add(name));
    changed.add("events");
  } else {
    for (const [name, change] of Object.entries(message.changes)) {
      const rows = (fleet.tables[name] ??= {});
      for (const key of change.gone) delete rows[key];
      for (const [key, fields] of Object.entries(change.set)) rows[key] = { ...rows[key], ...fields };
      changed.add(name);
    }
    if (message.events.length) {
      fleet.events = [...fleet.events, ...message.events].slice(-500);
      changed.add("events");
    }
  }
  fleet.clockMs = message.now_ms - Date.now();
  fleet.seen = true;
  heard();
  for (const listener of listeners) listener(changed);
}

export async function ask(path, body) {
  let answer;
  try {
    answer = await fetch(path, body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  } catch {
    throw new Error("The dashboard does not answer; nothing was looked up.");
  }
  const told = answer.headers.get("Content-Type")?.startsWith("application/json") ? await answer.json() : { error: await answer.text() };
  if (!answer.ok) throw new Error(told.error);
  return told;
}
