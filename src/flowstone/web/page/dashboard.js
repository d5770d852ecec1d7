// The dashboard: receives events from the server, redraws at most twice a second, and handles keys.

import { Keyed, element, mark, say } from "./dom.js";
import { Feed, ask } from "./feed.js";
import { Findings } from "./findings.js";
import { Pipeline } from "./pipeline.js";
import { ReplicaSet, sectionId } from "./replica_set.js";
import { Transactions } from "./transactions.js";
import { verdict } from "./verdict.js";
import { ago, clock } from "./words.js";

const SHOW_SECONDS = 0.5;
/** A verdict must last this long to be shown: screen readers announce every change. */
const VERDICT_SECONDS = 1;
const STALE_SECONDS = 10;
const THEMES = ["system", "light", "dark"];

const byId = (id) => document.getElementById(id);

/** Settings in the browser's local storage, if it is available. */
const memory = {
  get(name) {
    try {
      return localStorage.getItem(`flowstone.${name}`);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`flowstone.${name}`, value);
    } catch {
      // Without storage, the setting lasts until the page is closed.
    }
  },
};

class Dashboard {
  constructor() {
    this.state = null;
    this.receivedAt = null;
    this.connection = "connecting";
    this.isHistoryStale = false;
    this.isPaused = false;
    this.isScheduled = false;
    this.shownAt = 0;
    this.findings = new Findings();
    this.transactions = new Transactions(byId("transactions"));
    this.pipeline = new Pipeline(byId("pipeline"));
    this.sets = new Keyed(byId("sets"), ({ set }) => this.makeSet(set));
    this.sections = new Keyed(byId("sections"), makeSection);
    this.feed = new Feed({
      onConnection: (connection) => this.connected(connection),
      onState: (state) => this.receive(state),
      onTransactions: (batch) => {
        this.transactions.add(batch);
        this.schedule();
      },
    });
  }

  start() {
    this.feed.open();
    setInterval(() => this.showLive(), 1000);
    document.addEventListener("visibilitychange", () => this.schedule());
    addEventListener("pagehide", () => this.feed.source?.close());
    addEventListener("pageshow", (event) => event.persisted && this.feed.open());
  }

  makeSet(set) {
    const made = new ReplicaSet(set);
    this.loadHistory(set, made);
    return made;
  }

  async loadHistory(set, made) {
    try {
      const { points } = await ask("api/history", { set: set.uuid });
      made.lag.history.load(points);
      this.schedule();
    } catch {
      // The history builds up again from the next states.
    }
  }

  /** Handles a change of the connection. What was missed is requested with the next state: a server that has just
   * started does not know the sets of the last one. */
  connected(connection) {
    this.connection = connection;
    if (connection === "connected") {
      this.transactions.isStale = true;
      this.isHistoryStale = true;
    }
    this.showLive();
    this.schedule();
  }

  receive(state) {
    for (const set of state.sets) set.label = labelOf(set);
    this.state = state;
    this.receivedAt = performance.now();
    for (const set of state.sets) {
      const made = this.sets.kept.get(sectionId(set));
      if (made === undefined) continue; // makeSet loads the history
      if (this.isHistoryStale) this.loadHistory(set, made);
      made.lag.history.add(state.now, set.links);
    }
    this.isHistoryStale = false;
    this.showVerdict();
    this.schedule();
  }

  /** Schedules a redraw: at most one per SHOW_SECONDS, none while the page is hidden or paused. */
  schedule() {
    if (this.isScheduled || this.isPaused || document.hidden || this.state === null) return;
    this.isScheduled = true;
    const wait = Math.max(0, this.shownAt + SHOW_SECONDS * 1000 - performance.now());
    setTimeout(() => requestAnimationFrame(() => {
      this.isScheduled = false;
      this.shownAt = performance.now();
      if (!this.isPaused) this.show(this.state);
    }), wait);
  }

  show(state) {
    this.findings.update(state.findings ?? []);
    this.sets.show(state.sets.map((set) => ({ set, now: state.now })), ({ set }) => sectionId(set));
    this.transactions.name(state.sets);
    this.transactions.update();
    this.pipeline.update(state.pipeline ?? []);
    this.sections.show(sectionsOf(state), ({ id }) => id);
    say(byId("version"), state.version);
    this.showLive();
  }

  showVerdict() {
    const { kind, text } = verdict(this.state);
    const shown = byId("verdict");
    document.title = `${{ well: "", busy: "▲ ", bad: "✕ " }[kind]}${text} · Flowstone`;
    if (text === shown.textContent || this.isPaused) {
      clearTimeout(this.verdictTimer);
      this.verdictTimer = null;
      return;
    }
    this.verdictTimer ??= setTimeout(() => {
      this.verdictTimer = null;
      const last = verdict(this.state);
      mark(shown, "data-kind", last.kind);
      say(shown, last.text);
    }, shown.dataset.kind === "quiet" ? 0 : VERDICT_SECONDS * 1000);
  }

  showLive() {
    const live = byId("live");
    const age = this.receivedAt === null ? null : (performance.now() - this.receivedAt) / 1000;
    const last = age === null ? "" : ` · ${ago(age)}`;
    const isStale = age !== null && age > STALE_SECONDS;
    if (this.isPaused) {
      mark(live, "data-kind", "quiet");
      say(live, `paused at ${clock(this.pausedAt)}`);
    } else if (this.connection === "connected" && !isStale) {
      mark(live, "data-kind", "well");
      say(live, `live${last}`);
    } else {
      mark(live, "data-kind", this.connection === "lost" ? "bad" : "busy");
      say(live, `${this.connection === "lost" ? "reconnecting" : isStale ? "no data" : "connecting"}${last}`);
    }
  }

  pause() {
    this.isPaused = !this.isPaused;
    this.pausedAt = this.state?.now ?? Date.now() / 1000;
    mark(byId("pause"), "aria-pressed", this.isPaused ? "true" : "false");
    say(byId("pause"), this.isPaused ? "Resume" : "Pause");
    mark(document.documentElement, "data-paused", this.isPaused);
    this.showLive();
    if (!this.isPaused && this.state !== null) this.showVerdict();
    this.schedule();
  }
}

/** The name of a set, or the beginning of its UUID; the full UUID is next to the title. */
function labelOf(set) {
  if (set.name) return set.name;
  return set.uuid ? `set ${set.uuid.slice(0, 8)}` : "no replica set";
}

function sectionsOf(state) {
  return [{ id: "findings", text: "Attention", number: (state.findings ?? []).length },
    ...state.sets.map((set) => ({ id: sectionId(set), text: set.label })),
    { id: "transactions", text: "Transactions" }, { id: "pipeline", text: "Pipeline" }];
}

function makeSection() {
  const link = element("a");
  const number = element("span", { class: "number" });
  const node = element("li", {}, link, number);
  const update = ({ id, text, number: found }) => {
    mark(link, "href", `#${id}`);
    say(link, text);
    mark(number, "hidden", !found);
    say(number, found || "");
  };
  return { node, update };
}

function showTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  say(byId("theme"), `Theme: ${theme}`);
}

function nextTheme() {
  const now = memory.get("theme") ?? "system";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  memory.set("theme", next);
  showTheme(next);
}

function goTo(number) {
  const link = byId("sections").querySelectorAll("a")[number - 1];
  const section = link && byId(link.getAttribute("href").slice(1));
  section?.focus({ preventScroll: true });
  section?.scrollIntoView();
}

function listenToKeys(dashboard) {
  const shortcuts = byId("shortcuts");
  const isOn = byId("shortcuts-on");
  isOn.checked = memory.get("shortcuts") !== "off";
  isOn.addEventListener("change", () => memory.set("shortcuts", isOn.checked ? "on" : "off"));
  const help = () => shortcuts.showModal();
  const actions = {
    "?": help,
    "/": () => byId("filter-text").focus(),
    p: () => dashboard.pause(),
    t: nextTheme,
    j: () => dashboard.transactions.step(1),
    k: () => dashboard.transactions.step(-1),
  };
  byId("help").addEventListener("click", help);
  byId("shortcuts-close").addEventListener("click", () => shortcuts.close());
  document.addEventListener("keydown", (event) => {
    // An element in a dialog that was just closed keeps the focus for a moment.
    const isLeftOver = event.target.closest("dialog:not([open])") !== null;
    const isTyping = !isLeftOver && event.target.closest("input, select, textarea, dialog") !== null;
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !isOn.checked) return;
    const action = /^[1-9]$/.test(event.key) ? () => goTo(Number(event.key)) : actions[event.key];
    if (action !== undefined) {
      event.preventDefault();
      action();
    }
  });
}

const dashboard = new Dashboard();
showTheme(memory.get("theme") ?? "system");
byId("theme").addEventListener("click", nextTheme);
byId("pause").addEventListener("click", () => dashboard.pause());
listenToKeys(dashboard);
dashboard.start();
