// Which part is shown, how the connection is, and colours.
import { setText } from "./dom.js";
import { connect, fleet, listen } from "./feed.js";
import { overviewView } from "./overview.js";
import { queriesView } from "./queries.js";
import { queryView } from "./query.js";
import { eventsView } from "./events.js";
import { stateView } from "./state.js";

const main = document.getElementById("main");
const element = (id) => document.getElementById(id);
let shown = null;
let readEvents = 0;
let connection = ["", "connecting"];

const decoded = (text) => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};

function route() {
  const [section = "", name = ""] = location.hash.replace(/^#\/?/, "").split("/");
  shown?.close?.();
  if (section === "queries") shown = name ? queryView(decoded(name)) : queriesView();
  else if (section === "events") shown = eventsView();
  else if (section === "state") shown = stateView(decoded(name));
  else shown = overviewView();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${section}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (fleet.seen) draw();
}

function draw() {
  if (main.firstElementChild !== shown.element) main.replaceChildren(shown.element);
  main.setAttribute("aria-busy", "false");
  shown.update();
  drawFrame();
}

function drawFrame() {
  const told = fleet.tables.fleet.fleet ?? {};
  setText(element("uri"), told.uri ?? "");
  element("uri").title = told.uri ?? "";
  document.title = told.uri ? `Statefleet: ${told.uri}` : "Statefleet";
  if (location.hash.startsWith("#/events")) readEvents = fleet.events.at(-1)?.id ?? 0;
  const unread = fleet.events.filter((event) => event.is_bad && event.id > readEvents).length;
  element("bad-events").hidden = !unread;
  setText(element("bad-events"), String(unread));
  element("bad-events").title = `${unread} that somebody should look at`;
  drawConnection();
}

function drawConnection() {
  const [state, text] = connection;
  const error = fleet.tables.fleet.fleet?.error;
  const live = element("live");
  live.className = `live ${state === "on" && !error ? "on" : state === "" ? "" : "off"}`;
  setText(element("live-text"), state === "on" ? (error ? "coordinator away" : "live") : state === "" ? text : "not connected");
  const banner = element("banner");
  const messages = {
    off: `Not connected: ${text}. It is tried again; what is shown is as of the last word.`,
    denied: "The dashboard wants its token, which may have changed. `statefleet dashboard URI` prints the address with it.",
    on: error ? `The coordinator does not answer: ${error}. What is shown is as of its last answer.` : "",
  };
  setText(banner, messages[state] ?? "");
  banner.hidden = !banner.textContent;
}

// -- colours

const THEMES = { system: ["◐", "Colours: as the system has them"], light: ["☀", "Colours: light"], dark: ["☾", "Colours: dark"] };
const dark = matchMedia("(prefers-color-scheme: dark)");

function storedTheme() {
  try {
    return localStorage.getItem("statefleet-theme") ?? "system";
  } catch {
    return "system"; // a browser that keeps nothing
  }
}

let theme = storedTheme();
if (!(theme in THEMES)) theme = "system";

function applyTheme() {
  document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  const button = element("theme");
  setText(button, THEMES[theme][0]);
  button.setAttribute("aria-label", THEMES[theme][1]);
  button.title = THEMES[theme][1];
  if (fleet.seen && shown) shown.update();
}

element("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  try {
    localStorage.setItem("statefleet-theme", theme);
  } catch {
    // It holds for this page.
  }
  applyTheme();
});
dark.addEventListener("change", applyTheme);

// -- beginning

addEventListener("hashchange", () => {
  route();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});
let isDue = false;
listen((changed) => {
  if (!shown) return;
  if (!main.firstElementChild || main.firstElementChild !== shown.element || changed.has("fleet")) isDue = true;
  isDue ||= shown.uses.some((table) => changed.has(table)) || changed.has("events");
  // At most once a frame, and not while nobody looks.
  if (isDue) requestAnimationFrame(() => {
    if (isDue) {
      isDue = false;
      draw();
    }
  });
});
setInterval(() => {
  if (fleet.seen && !document.hidden) shown.ticks ? draw() : drawFrame();
}, 1000);

applyTheme();
route();
connect((state, text) => {
  connection = [state, text];
  if (fleet.seen) drawConnection();
  else {
    drawConnection();
    if (state !== "on") setText(element("loading") ?? document.createElement("p"), "The fleet is not seen yet.");
  }
});
