// Where the time of batches goes, as bars.
import { h, keyed } from "./dom.js";
import * as f from "./format.js";

export const total = (batch) => batch.phases.reduce((sum, ms) => sum + (ms ?? 0), 0);

export function bar(element, batch, largest) {
  keyed(element, f.PHASES.map(([name]) => name), (name) => h("i", { class: `p-${name}` }), (part, name) => {
    const place = f.PHASES.findIndex(([one]) => one === name);
    const ms = batch?.phases[place] ?? 0;
    const width = largest ? `${(ms / largest) * 100}%` : "0";
    if (part.style.width !== width) part.style.width = width;
    part.hidden = !ms;
  });
  const label = batch ? f.PHASES.map(([, text], place) => `${text} ${batch.phases[place] === null ? "not known" : f.duration(batch.phases[place])}`).join(", ") : "not known";
  element.title = label;
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", label);
}

export const legend = () => h("div", { class: "legend" },
  f.PHASES.map(([name, text, why]) => h("span", { title: why }, h("i", { class: `swatch p-${name}` }), text)));
