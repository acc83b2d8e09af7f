// The look-up of a key in a state, as the reads' own API answers it.
import { h, keyed, setText } from "./dom.js";
import { fleet, lookUp } from "./feed.js";

export function stateView(chosen) {
  const names = h("select", { onchange: () => (location.hash = `#/state/${encodeURIComponent(names.value)}`) });
  const parts = h("select", { onchange: () => ask(null) });
  const partsLabel = h("label", { hidden: true }, "part", parts);
  const keys = h("div", { class: "keys" });
  const find = h("button", { class: "primary", type: "submit" }, "Look up");
  const form = h("form", { class: "look", onsubmit: (event) => { event.preventDefault(); ask(typedKey()); } }, h("label", {}, "state", names), partsLabel, keys,
    h("div", { class: "buttons" }, find));
  const about = h("p", { class: "soft small" });
  const out = h("div", { "aria-live": "polite" });
  const element = h("section", { class: "card look-into", "aria-labelledby": "state-title" }, h("h2", { id: "state-title" }, "Look up a key"), form, about, out);
  let isDescribed = false;

  function update() {
    const all = Object.keys(fleet.queries);
    keyed(names, all, (name) => h("option", { value: name }, name));
    form.hidden = !all.length;
    if (!all.length) out.replaceChildren(h("p", { class: "empty" }, "There is no state yet to look into."));
    else if (chosen && !all.includes(chosen)) out.replaceChildren(h("p", { class: "bad" }, "The fleet has no such state (any more)."));
    else if (!isDescribed) {
      isDescribed = true;
      if (chosen) names.value = chosen;
      ask(null);
    }
  }

  const typedKey = () => Object.fromEntries([...keys.children].map((label) => {
    const [text, isNull] = label.querySelectorAll("input");
    return [label.dataset.column, isNull.checked ? null : text.value];
  }));

  // Without a key it asks for the columns only.
  async function ask(key) {
    find.disabled = true;
    try {
      const told = await lookUp(names.value, parts.value, key);
      if (key === null) describe(told);
      else out.replaceChildren(...answer(told));
    } catch (error) {
      out.replaceChildren(h("p", { class: "bad wrap" }, error.message));
    } finally {
      find.disabled = false;
    }
  }

  function describe(told) {
    keyed(parts, told.parts, (name) => h("option", { value: name }, name));
    parts.value = told.part;
    partsLabel.hidden = !told.parts.length;
    keys.replaceChildren(...told.columns.filter((column) => column.is_key).map(keyField));
    setText(about, `Columns: ${told.columns.map((column) => `${column.name} (${column.type})`).join(", ")}.`);
    out.replaceChildren();
  }
  return { element, update };
}

function keyField({ name, type }) {
  const example = /^(struct|list|large_list)/.test(type) ? "as JSON" : type.startsWith("timestamp") ? "2025-01-31 13:30:00" : null;
  const text = h("input", { placeholder: example, autocomplete: "off", spellcheck: "false" });
  const isNull = h("input", { type: "checkbox", "aria-label": `${name} is null`, onchange: () => (text.disabled = isNull.checked) });
  return h("label", { "data-column": name }, `${name} (${type})`, h("span", { class: "null" }, text, isNull, "null"));
}

function answer({ columns, rows, version, shard, more }) {
  const where = `version ${version}${shard === null ? "" : `, shard ${shard}`}`;
  if (!rows.length) return [h("h3", {}, `The key is not in ${where}`)];
  const isNumber = columns.map((column) => /^(u?int|float|double|decimal)/.test(column.type));
  return [h("h3", {}, `${rows.length}${more ? " or more" : ""} row${rows.length === 1 ? "" : "s"} at ${where}`), h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, columns.map((column, place) => h("th", { scope: "col", class: isNumber[place] ? "n" : null }, column.name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((text, place) => h("td", { class: isNumber[place] ? "wrap mono n" : "wrap mono" }, text)))))))];
}
