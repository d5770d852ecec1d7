// A timeline of terms and leaders, including periods without a leader and without elections.

import { Keyed, drawn, element, mark, say, table, tableRow } from "./dom.js";
import { clock, duration, moment } from "./words.js";

const HEIGHT = 54;
const TRACK = { top: 14, height: 22 };
const WINDOW_SECONDS_MIN = 60;
const GAP_WIDTH_MIN = 4;
const SPANS_SHOWN_MAX = 60;
const SPANS_SPOKEN_MAX = 6;
const TABLE_ROWS_MAX = 20;
const LETTER_WIDTH = 6.8;

export class Elections {
  constructor(set) {
    this.width = 0;
    this.spansGroup = drawn("g");
    this.ticksGroup = drawn("g", { class: "ticks" });
    const track = drawn("rect", { class: "track", y: TRACK.top, height: TRACK.height, width: "100%", rx: 3 });
    const attributes = { class: "timeline", role: "img", height: HEIGHT };
    this.svg = drawn("svg", attributes, track, this.spansGroup, this.ticksGroup);
    this.summary = element("p", { class: "summary" });
    const { node, body } = table(`Elections in ${set.label}, newest first`, ["Time", "Term", "Event"]);
    this.table = element("details", { class: "as-table" }, element("summary", {}, "As a table"), node);
    this.node = element("div", { class: "elections" }, this.summary, this.svg, this.table);
    this.spans = new Keyed(this.spansGroup, makeSpan);
    this.ticks = new Keyed(this.ticksGroup, makeTick);
    this.rows = new Keyed(body, () => {
      const row = tableRow(3);
      const update = (event) => {
        row.update([clock(event.at), event.term ?? "", words(event)]);
        mark(row.cells[0], "title", moment(event.at));
      };
      return { node: row.node, update };
    });
    this.observer = new ResizeObserver(([entry]) => {
      this.width = Math.round(entry.contentRect.width);
      if (this.set !== undefined) this.draw();
    });
    this.observer.observe(this.node);
  }

  update(set, now) {
    this.set = set;
    this.now = now;
    const events = set.elections ?? [];
    say(this.summary, summaryOf(set, events, now));
    mark(this.svg, "hidden", events.length === 0);
    mark(this.table, "hidden", events.length === 0);
    this.rows.show(events.slice(-TABLE_ROWS_MAX).reverse(), (event) => `${event.at} ${event.kind} ${event.term}`);
    this.draw();
  }

  close() {
    this.observer.disconnect();
  }

  draw() {
    const spans = spansOf(this.set.elections ?? [], this.now).slice(-SPANS_SHOWN_MAX);
    if (!this.width || !spans.length) return;
    const from = Math.min(spans[0].from, this.now - WINDOW_SECONDS_MIN);
    const scale = (at) => ((at - from) / (this.now - from)) * this.width;
    mark(this.svg, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    mark(this.svg, "width", this.width);
    const places = spans.map((span) => ({
      ...span, x: scale(span.from), width: scale(span.to) - scale(span.from), isLast: span === spans.at(-1),
    }));
    const gaps = places.filter((one) => !one.leader && !one.isOff);
    for (const place of gaps) place.width = Math.max(place.width, GAP_WIDTH_MIN);
    this.spans.show(places, (place) => `${place.from} ${place.leader} ${place.isOff} ${place.term}`);
    this.ticks.show(apart(places, this.width), (tick) => tick.key);
    mark(this.svg, "aria-label", spans.slice(-SPANS_SPOKEN_MAX).map(spoken).join("; "));
  }
}

/** Periods with one leader, without a leader, or without elections. */
function spansOf(events, now) {
  const spans = [];
  for (const event of events) {
    const last = spans.at(-1);
    if (event.kind === "term" && last !== undefined && !last.isOff) continue;
    const leader = event.kind === "leader" ? event.leader : 0;
    const isOff = event.kind === "off";
    const isSame = last !== undefined && last.leader === leader && last.isOff === isOff;
    if (isSame && (!leader || last.term === event.term)) continue;
    if (last !== undefined) last.to = event.at;
    const label = event.leader_label ?? `replica ${leader}`;
    spans.push({ from: event.at, to: now, leader, isOff, term: event.term, label });
  }
  return spans;
}

/** The tick labels that fit below the timeline without overlapping. */
function apart(places, width) {
  const ticks = [];
  let free = 0;
  for (const place of places) {
    if (place.x >= free && place.x < width - 60) {
      ticks.push({ key: place.from, x: place.x, text: clock(place.from) });
      free = place.x + 66;
    }
  }
  return [...ticks, { key: "now", x: width, text: "now", anchor: "end" }];
}

function makeSpan() {
  const box = drawn("rect", { y: TRACK.top, height: TRACK.height, rx: 3 });
  const text = drawn("text", { y: TRACK.top + 15 });
  const title = drawn("title");
  const node = drawn("g", { class: "span" }, title, box, text);
  const update = (place) => {
    mark(node, "data-leader", place.leader ? place.leader % 6 : place.isOff ? "off" : "none");
    mark(node, "data-last", place.isLast);
    mark(box, "x", place.x.toFixed(1));
    mark(box, "width", Math.max(1, place.width - 1).toFixed(1));
    mark(text, "x", (place.x + 6).toFixed(1));
    const name = place.leader ? `${place.label} · term ${place.term}` : place.isOff ? "elections off" : "no leader";
    const shorter = place.leader ? `term ${place.term}` : "";
    say(text, [name, shorter].find((one) => one.length * LETTER_WIDTH < place.width - 8) ?? "");
    say(title, spoken(place));
  };
  return { node, update };
}

function makeTick() {
  const node = drawn("text", { y: HEIGHT - 4 });
  const update = ({ x, text, anchor }) => {
    mark(node, "x", x.toFixed(1));
    mark(node, "text-anchor", anchor ?? "start");
    say(node, text);
  };
  return { node, update };
}

function words(event) {
  if (event.kind === "leader") return `${event.leader_label ?? `replica ${event.leader}`} became leader`;
  return { no_leader: "no leader", off: "elections off" }[event.kind] ?? "new term";
}

function spoken(span) {
  const without = span.isOff ? "elections off" : "no leader";
  const what = span.leader ? `${span.label} led in term ${span.term}` : without;
  return `${what} from ${clock(span.from)} for ${duration(span.to - span.from)}`;
}

function summaryOf(set, events, now) {
  if (!events.length) return "No elections seen.";
  const last = spansOf(events, now).at(-1);
  const since = duration(Math.max(0, now - last.from));
  if (last.isOff) return "Elections are off.";
  if (!last.leader) return `No leader for ${since}.`;
  return `${last.label} has led for ${since}, in term ${set.term ?? last.term}.`;
}
