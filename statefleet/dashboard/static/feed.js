// What the dashboard tells: the fleet as one JSON document, asked for every two seconds while the page is looked at.

const EVERY_MS = 2000;
const PATIENCE_MS = 20000; // for an answer; the dashboard itself says after five seconds that the coordinator gives none

export const fleet = { uri: "", actors: {}, executors: [], queries: {}, drained: [], error: null, clockMs: 0, seen: false };
export const now = () => Date.now() + fleet.clockMs;
export const allShards = () => Object.values(fleet.queries).flatMap((query) => query.shards);

// Calls back after each request with how the connection is: "on", "off" or "denied".
export async function poll(tell) {
  if (!document.hidden) tell(await look());
  setTimeout(() => poll(tell), EVERY_MS);
}

async function look() {
  try {
    const answer = await fetch("api/fleet", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.status === 401) return "denied";
    if (!answer.ok) return "off";
    take(await answer.json());
    return "on";
  } catch {
    return "off";
  }
}

function take(told) {
  fleet.clockMs = told.now_ms - Date.now();
  fleet.error = told.error;
  if (told.fleet === null) return;
  const { uri, drained, executors, running, behind_records, store_actors, queries } = told.fleet;
  for (const query of queries) {
    query.running = running[query.name] ?? null;
    query.behind_records = behind_records[query.name] ?? null;
    for (const shard of query.shards) {
      shard.state = query.name;
      shard.locality = shard.operations ? shard.operations_local / shard.operations : null;
    }
  }
  const actors = Object.fromEntries(store_actors.map((actor) => [actor.actor_name, actor]));
  Object.assign(fleet, { uri, drained, executors, actors, queries: Object.fromEntries(queries.map((query) => [query.name, query])), seen: true });
}

export async function lookUp(state, part, key) {
  let answer;
  try {
    answer = await fetch(`api/states/${encodeURIComponent(state)}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ part, key }) });
  } catch {
    throw new Error("The dashboard does not answer; nothing was looked up.");
  }
  const told = answer.headers.get("Content-Type")?.startsWith("application/json") ? await answer.json() : { error: await answer.text() };
  if (!answer.ok) throw new Error(told.error);
  return told;
}
