// Figures as people read them; "–" is what is not known.

import { fleet } from "./feed.js";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const unknown = "–";
const given = (value) => value !== null && value !== undefined;

export const count = (value) => (given(value) ? whole.format(value) : unknown);
export const brief = (value) => (given(value) ? short.format(value) : unknown);
export const percent = (value) => (given(value) ? `${value === 1 ? 100 : Math.min(99.9, value * 100).toFixed(value < 0.1 ? 1 : 0)} %` : unknown);

export function bytes(value) {
  if (!given(value)) return unknown;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${value < 10 && unit !== "B" ? value.toFixed(1) : whole.format(value)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

export function duration(ms) {
  if (!given(ms)) return unknown;
  if (ms < 1000) return `${whole.format(ms)} ms`;
  const s = ms / 1000;
  if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${whole.format(s / 86400)} days`;
}

export const ago = (ms, now) => (given(ms) ? `${duration(Math.max(0, now - ms))} ago` : unknown);
export const moment = (ms) => (given(ms) ? `${new Date(ms).toISOString().replace("T", " ").slice(0, 19)} UTC` : unknown);
// Times are UTC everywhere, as in the coordinator's own sentences.
export const clock = (ms) => (given(ms) ? new Date(ms).toISOString().slice(11, 19) : unknown);
export const day = (ms) => (given(ms) ? new Date(ms).toISOString().slice(0, 10) : unknown);
export const shortId = (id) => (id ? id.slice(0, 12) : unknown);
// A store actor as people are told it: the address of its node, and its number there.
export function actorName(name) {
  if (!name) return unknown;
  const host = fleet.actors[name]?.host;
  const short = name.replace(/^statefleet-store-[0-9a-f]+-/, "");
  return host ? `${host}#${/-(\d+)$/.exec(short)?.[1] ?? 0}` : `store-${short}`;
}
export const plural = (number, noun, many = `${noun}s`) => `${number < 1e6 ? count(number) : brief(number)} ${number === 1 ? noun : many}`;

export const PHASES = [
  ["spark", "Spark", "source, plan, map side and exchange, until the shard's task asks for its lease or begins"],
  ["lease", "Lease", "the coordinator's answer; nothing where the lease came with the commit before"],
  ["hand_over", "Hand-over", "rows to the store actor, which brings the shard to its version"],
  ["apply", "Apply", "the store actor works on the rows"],
  ["write", "Write", "the delta file goes to the object store"],
  ["commit", "Commit", "until the version is in the log"],
  ["end", "Sink and end", "the sink, until Spark is at the end of the batch"],
];
