// What a page does beyond what the server rendered: follow the fleet, colour the map, walk it by keys, switch the theme.
// Everything works without it; nothing is loaded from elsewhere.
"use strict";

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

// Theme: a cookie, so that the server renders the right one and nothing flashes.
const toggle = $("#theme");
toggle.hidden = false;
toggle.addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  const next = dark ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  document.cookie = `headway_theme=${next}; path=/console; max-age=31536000; samesite=strict`;
});

// What takes something out of service asks first.
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-confirm]");
  if (button && !confirm(button.dataset.confirm)) event.preventDefault();
});

// Parts that follow: fetched anew and put in place node by node, so that focus, scrolling and selection stay.
function patch(now, then) {
  if (now.nodeType !== then.nodeType || now.nodeName !== then.nodeName) return now.replaceWith(then);
  if (now.nodeType !== Node.ELEMENT_NODE) {
    if (now.nodeValue !== then.nodeValue) now.nodeValue = then.nodeValue;
    return;
  }
  if (now.isEqualNode(then)) return;
  for (const { name, value } of [...then.attributes]) if (now.getAttribute(name) !== value) now.setAttribute(name, value);
  for (const { name } of [...now.attributes]) if (!then.hasAttribute(name)) now.removeAttribute(name);
  const [left, right] = [[...now.childNodes], [...then.childNodes]];
  left.slice(right.length).forEach((node) => node.remove());
  right.forEach((node, index) => (index < left.length ? patch(left[index], node) : now.append(node)));
}

let refreshing = false;
let ticks = 0;
async function refresh() {
  if (refreshing || document.hidden) return;
  refreshing = true;
  ticks += 1;
  try {
    for (const part of $$("[data-live]")) {
      if (ticks % Number(part.dataset.every || 1)) continue;
      const answer = await fetch(location.href, { headers: { "X-Headway-Part": part.dataset.live } });
      if (answer.redirected) return location.reload();
      if (!answer.ok) continue;
      const fresh = part.cloneNode(false);
      fresh.append(new DOMParser().parseFromString(await answer.text(), "text/html").body);
      fresh.replaceChildren(...fresh.firstChild.childNodes);
      patch(part, fresh);
    }
  } catch {
    // The stream says that the connection is lost.
  } finally {
    refreshing = false;
  }
}

// The map.
const map = $("#map");
const cells = map ? $$("#map .c") : [];
let told = null;

function level(metric, value) {
  if (value < 0) return -1;
  return Math.max(0, Math.min(9, Math.floor(metric === "heat" ? (value - 30) / 6 : value / 10)));
}

function colour() {
  const metric = map.dataset.by;
  const values = told[metric];
  cells.forEach((cell, index) => {
    const [value, state] = [values[index], told.states[index]];
    const [step, words] = [String(level(metric, value)), value < 0 ? "unknown" : `${value} ${metric === "heat" ? "°C" : "%"}`];
    if (cell.dataset.l !== step) cell.dataset.l = step;
    if (cell.dataset.s !== state) cell.dataset.s = state;
    const label = `${cell.ariaLabel.split(",")[0]}, ${words}${state === "ok" ? "" : `, ${state}`}`;
    if (cell.ariaLabel !== label) cell.ariaLabel = label;
  });
}

function take(event) {
  told = JSON.parse(event.data);
  const first = !map && told.states.length && location.pathname === "/console/fleet";
  if (first || (map && told.layout !== map.dataset.layout)) return location.reload();
  if (map) colour();
  refresh();
}

function follow() {
  const stream = new EventSource("/console/live");
  const lost = $("#connection");
  stream.addEventListener("fleet", (event) => {
    lost.hidden = true;
    take(event);
  });
  stream.addEventListener("ended", () => navigator.cookieEnabled && location.reload());
  stream.addEventListener("error", () => {
    lost.hidden = false;
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => location.reload(), 5000);
  });
  addEventListener("pagehide", () => stream.close());
}
if (map || $("[data-live]")) follow();

if (map) {
  // One stop of the tab key for the whole map; the arrow keys walk it.
  const say = (cell) => {
    $("#tip").textContent = `${cell.closest(".node").ariaLabel}: ${cell.ariaLabel}`;
  };
  if (cells.length) cells[0].tabIndex = 0;
  map.addEventListener("focusin", (event) => event.target.matches(".c") && say(event.target));
  map.addEventListener("pointerover", (event) => event.target.matches(".c") && say(event.target));
  map.addEventListener("keydown", (event) => {
    const at = cells.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 4, ArrowUp: -4, Home: -at, End: cells.length - 1 - at }[event.key];
    if (at < 0 || step === undefined) return;
    event.preventDefault();
    const next = cells[Math.max(0, Math.min(cells.length - 1, at + step))];
    cells[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  for (const tab of $$("[data-metric]")) {
    tab.addEventListener("click", (event) => {
      if (!told) return;
      event.preventDefault();
      map.dataset.by = tab.dataset.metric;
      $$("[data-metric]").forEach((each) => (each === tab ? each.setAttribute("aria-current", "true") : each.removeAttribute("aria-current")));
      const heat = map.dataset.by === "heat";
      $("#legend-low").textContent = heat ? "30 °C" : "0 %";
      $("#legend-high").textContent = heat ? "90 °C" : "100 %";
      const address = new URL(location.href);
      address.searchParams.set("by", map.dataset.by);
      history.replaceState(null, "", address);
      colour();
    });
  }
}
