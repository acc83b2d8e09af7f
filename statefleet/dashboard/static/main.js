// Which part is shown, how the connection is, and colours.
import { setText } from "./dom.js";
import { fleet, poll } from "./feed.js";
import { overviewView } from "./overview.js";
import { queryView } from "./query.js";
import { eventsView } from "./events.js";
import { stateView } from "./state.js";

const element = (id) => document.getElementById(id);
const main = element("main");
let shown = null;

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function route() {
  const [section = "", name = ""] = location.hash.replace(/^#\/?/, "").split("/");
  shown?.close?.();
  if (section === "queries" && name) shown = queryView(decoded(name));
  else if (section === "events") shown = eventsView();
  else if (section === "state") shown = stateView(decoded(name));
  else shown = overviewView();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#/${section}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  draw();
}

function draw() {
  if (!fleet.seen) return;
  if (main.firstElementChild !== shown.element) main.replaceChildren(shown.element);
  main.setAttribute("aria-busy", "false");
  shown.update();
  setText(element("uri"), fleet.uri);
  element("uri").title = fleet.uri;
  document.title = `Statefleet: ${fleet.uri}`;
}

function tell(connection) {
  const isLive = connection === "on" && !fleet.error;
  element("live").className = `live ${isLive ? "on" : "off"}`;
  setText(element("live-text"), isLive ? "live" : connection === "on" ? "coordinator away" : "not connected");
  const messages = {
    off: "Not connected: the dashboard does not answer. It is tried again; what is shown is as of the last word.",
    denied: "The dashboard wants its token, which may have changed. `statefleet dashboard URI` prints the address with it.",
    on: fleet.error ? `The coordinator does not answer: ${fleet.error}. What is shown is as of its last answer.` : "",
  };
  setText(element("banner"), messages[connection]);
  element("banner").hidden = isLive;
  draw();
}

// -- colours

const THEMES = { system: ["◐", "Colours: as the system has them"], light: ["☀", "Colours: light"], dark: ["☾", "Colours: dark"] };
const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = "system";
try {
  theme = localStorage.getItem("statefleet-theme") ?? theme;
} catch {
  // a browser that keeps nothing
}
if (!(theme in THEMES)) theme = "system";

function applyTheme() {
  document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  const [sign, text] = THEMES[theme];
  setText(element("theme"), sign);
  element("theme").setAttribute("aria-label", text);
  element("theme").title = text;
  draw();
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
applyTheme();
route();
poll(tell);
