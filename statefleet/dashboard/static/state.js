// Rows of a state: those of a key, now and at the versions before, or some of them.
import { h, keyed } from "./dom.js";
import * as f from "./format.js";
import { ask, fleet } from "./feed.js";

export function stateView(chosen) {
  let described = null;
  let asked = 0;
  const names = h("select", { name: "state", onchange: () => (location.hash = `#/state/${encodeURIComponent(names.value)}`) });
  const parts = h("select", { name: "part", onchange: () => describe() });
  const partsLabel = h("label", { hidden: true }, "part", parts);
  const history = h("select", { name: "versions" }, [1, 5, 10, 20].map((number) => h("option", { value: number, selected: number === 5 }, number === 1 ? "the newest version" : `the newest ${number} versions`)));
  const keys = h("div", { class: "keys" });
  const find = h("button", { class: "primary", type: "submit" }, "Look up");
  const some = h("button", { type: "button", onclick: () => showSome() }, "Show some rows");
  const form = h("form", { class: "look", onsubmit: (event) => { event.preventDefault(); lookUp(); } }, h("label", {}, "state", names), partsLabel, keys,
    h("label", {}, "at", history), h("div", { class: "buttons" }, find, some));
  const about = h("p", { class: "soft small" });
  const out = h("div", { "aria-live": "polite" });
  const element = h("section", { class: "card look-into", "aria-labelledby": "state-title" }, h("div", { class: "head" }, h("h2", { id: "state-title" }, "Look into state")), form, about, out);

  function update() {
    const all = Object.keys(fleet.tables.queries);
    keyed(names, all, (name) => h("option", { value: name }, name));
    form.hidden = !all.length;
    if (!all.length) {
      out.replaceChildren(h("p", { class: "empty" }, "There is no state yet to look into."));
      return;
    }
    const name = chosen && all.includes(chosen) ? chosen : names.value || all[0];
    if (described === null || names.value !== name) {
      names.value = name;
      described = name;
      out.replaceChildren(chosen && !all.includes(chosen) ? h("p", { class: "bad" }, "The fleet has no such state (any more).") : "");
      parts.replaceChildren();
      describe();
    }
  }
  const path = (end = "") => `api/states/${encodeURIComponent(names.value)}${end}?part=${encodeURIComponent(parts.value)}`;

  async function working(work) {
    const mine = ++asked;
    find.disabled = some.disabled = true;
    out.setAttribute("aria-busy", "true");
    try {
      const shown = await work();
      if (mine === asked && shown) out.replaceChildren(...[shown].flat());
    } catch (error) {
      if (mine === asked) out.replaceChildren(h("p", { class: "bad wrap" }, error.message));
    } finally {
      if (mine === asked) {
        find.disabled = some.disabled = false;
        out.removeAttribute("aria-busy");
      }
    }
  }
  const describe = () => working(async () => {
    let told = await ask(path());
    if (told.parts.length && !parts.options.length) {
      parts.replaceChildren(...told.parts.map((name) => h("option", { value: name }, name)));
      told = await ask(path());
    }
    partsLabel.hidden = !told.parts.length;
    const types = new Map(told.columns.map((column) => [column.name, column]));
    keys.replaceChildren(...told.keys.map((name) => keyField(types.get(name))));
    about.textContent = `Columns: ${told.columns.map((one) => `${one.name} (${one.type})`).join(", ")}. Versions from ${told.oldest} on can be read.`;
    return null;
  });

  const lookUp = () => working(async () => {
    const key = {};
    for (const field of keys.children) key[field.dataset.column] = field.value();
    const told = await ask(path("/look-up"), { key, versions: Number(history.value) });
    const [newest] = told.versions;
    const found = newest.rows.length ? `${newest.rows.length}${newest.more ? " or more" : ""} row${newest.rows.length === 1 ? "" : "s"} at version ${newest.version}` : `The key is not in version ${newest.version}`;
    return [h("h3", {}, found), historyTable(told.versions), told.complete ? "" : h("p", { class: "soft small" }, "Older versions take longer to load; the time was up.")];
  });

  const showSome = () => working(async () => {
    const told = await ask(`${path("/rows")}&limit=20`);
    if (!told.rows.length) return h("p", { class: "empty" }, `Version ${told.version} has no rows.`);
    return [h("h3", {}, `Some rows of version ${told.version}, in no particular order`), rowTable(told.rows.map((row) => [null, row]))];
  });
  return { element, update, uses: ["queries"] };
}

// A field for each column; of a struct, such as a window, one for each of its own.
function keyField(column, path = column.name) {
  const isNull = h("input", { type: "checkbox", "aria-label": `${path} is null` });
  let element;
  if (column.fields) {
    const fields = column.fields.map((one) => keyField(one, `${path}.${one.name}`));
    const inner = h("div", { class: "inner" }, fields);
    isNull.addEventListener("change", () => inner.querySelectorAll("input").forEach((one) => (one.disabled = isNull.checked)));
    element = h("fieldset", {}, h("legend", {}, column.name, " ", h("span", { class: "null" }, isNull, "null")), inner);
    element.value = () => (isNull.checked ? null : Object.fromEntries(fields.map((one) => [one.dataset.column, one.value()])));
  } else {
    const input = h("input", { "data-key": path, placeholder: column.example, autocomplete: "off", spellcheck: "false" });
    isNull.addEventListener("change", () => (input.disabled = isNull.checked));
    element = h("label", {}, `${column.name} (${column.type})`, h("span", { class: "null" }, input, isNull, "null"));
    element.value = () => (isNull.checked ? null : input.value);
  }
  element.dataset.column = column.name;
  return element;
}

function historyTable(versions) {
  const rows = versions.flatMap(({ version, rows: found }) => (found.length ? found.map((row) => [version, row]) : [[version, null]]));
  return rows.every(([, row]) => row === null) ? h("p", { class: "soft" }, "Nor is it in the versions before that were read.") : rowTable(rows);
}

function rowTable(rows) {
  const names = Object.keys(rows.find(([, row]) => row !== null)[1]);
  const hasVersion = rows.some(([version]) => version !== null);
  return h("div", { class: "scroll" }, h("table", { class: "rows" }, h("thead", {}, h("tr", {}, hasVersion && h("th", { scope: "col" }, "version"), names.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows.map(([version, row]) => h("tr", {}, hasVersion && h("td", { class: "num" }, String(version)),
      row === null ? h("td", { class: "soft", colspan: names.length }, "not there") : names.map((name) => h("td", { class: typeof row[name] === "number" ? "wrap mono n" : "wrap mono" }, shown(row[name]))))))));
}

// A struct or a list is JSON, with room to break a line between its parts.
const shown = (value) => (value === null ? "null" : typeof value === "number" ? f.number(value) : typeof value === "object" ? json(value) : String(value));
const json = (value) => (Array.isArray(value) ? `[${value.map(json).join(", ")}]`
  : typeof value === "object" && value !== null ? `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${json(one)}`).join(", ")}}`
  : typeof value === "number" ? f.number(value) : JSON.stringify(value));
