// The lag of each link over the last 15 minutes, as a small chart.

import { Keyed, drawn, element, mark, say } from "./dom.js";
import { clock, count, counted, duration } from "./words.js";

const WINDOW_SECONDS = 900;
const POINTS_MAX = 900;
const POINT_SECONDS = 1;
/** If there are more links, only those with the largest lag are kept and drawn; the table has all. */
const LINKS_MAX = 24;
const CHART = { width: 300, height: 56 };
/** Minimum of the scale, so that ordinary jitter does not look like an outage. */
const SCALE_MIN = { lag: 1, lag_lsn: 10 };

const keyOf = (link) => `${link.follower} ${link.master}`;

/** The points of one set, oldest first; at most POINTS_MAX. */
export class History {
  constructor() {
    this.points = [];
  }

  /** Replaces the points with those of the server. */
  load(points) {
    this.points = points.slice(-POINTS_MAX).map(({ at, links }) => point(at, links));
  }

  add(at, links) {
    const last = this.points.at(-1);
    if (last !== undefined && at - last.at < POINT_SECONDS) return;
    this.points.push(point(at, links));
    if (this.points.length > POINTS_MAX) this.points.shift();
  }

  /** Pairs of time and value of a link since `from`. */
  of(key, measure, from) {
    return this.points.filter(({ at }) => at >= from).map(({ at, links }) => [at, links.get(key)?.[measure] ?? null]);
  }
}

function mostLagging(links) {
  if (links.length <= LINKS_MAX) return links;
  return [...links].sort((a, b) => (b.lag_lsn ?? 0) - (a.lag_lsn ?? 0)).slice(0, LINKS_MAX);
}

function point(at, links) {
  const pairs = mostLagging(links).map((link) => [keyOf(link), { lag: link.lag, lag_lsn: link.lag_lsn }]);
  return { at, links: new Map(pairs) };
}

export class Lag {
  constructor(set) {
    this.history = new History();
    this.measure = "lag";
    this.isVisible = true;
    this.drawnAt = 0;
    const name = `measure-${set.uuid ?? "unknown"}`;
    const choice = (value, text) => {
      const input = element("input", { type: "radio", name, value });
      input.checked = value === this.measure;
      input.addEventListener("change", () => {
        this.measure = value;
        this.draw();
      });
      return element("label", {}, input, ` ${text}`);
    };
    this.charts = element("ul", { class: "charts" });
    this.none = element("p", { class: "quiet" }, "No replication links.");
    const legend = element("legend", {}, "Lag in");
    const choices = [choice("lag", "seconds"), choice("lag_lsn", "rows")];
    const measures = element("fieldset", { class: "choice" }, legend, ...choices);
    this.node = element("div", { class: "lag" }, measures, this.charts, this.none);
    this.list = new Keyed(this.charts, () => this.makeChart());
    this.observer = new IntersectionObserver(([entry]) => {
      this.isVisible = entry.isIntersecting;
      if (this.isVisible && this.set !== undefined) this.draw();
    }, { rootMargin: "50%" });
    this.observer.observe(this.node);
  }

  update(set, now) {
    this.set = set;
    this.now = now;
    this.names = new Map(set.members.map((member) => [member.uuid, member.label]));
    mark(this.none, "hidden", set.links.length > 0);
    // There is at most one new point per second.
    if (this.isVisible && now - this.drawnAt >= POINT_SECONDS) this.draw();
  }

  close() {
    this.observer.disconnect();
  }

  draw() {
    const from = this.now - WINDOW_SECONDS;
    this.drawnAt = this.now;
    const pairsOf = (link) => this.history.of(keyOf(link), this.measure, from);
    const series = mostLagging(this.set.links).map((link) => ({ link, pairs: pairsOf(link) }));
    let most = SCALE_MIN[this.measure];
    for (const { pairs } of series) for (const [, value] of pairs) most = Math.max(most, value ?? 0);
    // All charts have the same scale, so that they can be compared.
    this.list.show(series.map((one) => ({ ...one, most, from })), ({ link }) => keyOf(link));
  }

  makeChart() {
    const area = drawn("path", { class: "area" });
    const line = drawn("path", { class: "line" });
    const viewBox = `0 0 ${CHART.width} ${CHART.height}`;
    const svg = drawn("svg", { class: "chart", role: "img", viewBox, preserveAspectRatio: "none" }, area, line);
    const name = element("span", { class: "name" });
    const now = element("span", { class: "now" });
    const top = element("span", { class: "top-value" });
    const start = element("span");
    const axis = element("p", { class: "axis", "aria-hidden": "true" }, start, element("span", {}, "now"));
    const title = element("p", { class: "chart-title" }, name, now);
    const node = element("li", {}, title, element("div", { class: "plot" }, svg, top), axis);
    const text = (value) => (this.measure === "lag" ? duration(value) : counted(value, "row"));
    const update = ({ link, pairs, most, from }) => {
      const values = pairs.map(([, value]) => value).filter((value) => value !== null);
      const worst = values.length ? Math.max(...values) : null;
      say(name, `${this.names.get(link.follower) ?? "?"} ← ${this.names.get(link.master) ?? "?"}`);
      const current = this.measure === "lag" ? link.lag : link.lag_lsn;
      say(now, current === null ? "unknown" : text(current));
      say(top, this.measure === "lag" ? duration(most) : count(most));
      say(start, clock(from).slice(0, 5));
      const most15 = worst === null ? "unknown" : text(worst);
      mark(svg, "aria-label", `${name.textContent}: now ${now.textContent}, at most ${most15} in the last 15 minutes`);
      const shape = outline(pairs, from, most, this.now);
      mark(line, "d", shape.line);
      mark(area, "d", shape.area);
    };
    return { node, update };
  }
}

/** Paths of a line and of the area below it. Each pixel shows its maximum; gaps in the data stay gaps. */
function outline(pairs, from, most, now) {
  const columns = new Map();
  for (const [at, value] of pairs) {
    const x = Math.min(CHART.width, Math.round(((at - from) / WINDOW_SECONDS) * CHART.width));
    const seen = columns.get(x);
    columns.set(x, value === null ? seen ?? null : Math.max(seen ?? 0, value));
  }
  const parts = [];
  let part = [];
  for (const [x, value] of columns) {
    if (value === null) {
      if (part.length) parts.push(part);
      part = [];
    } else {
      part.push([x, CHART.height - 1.5 - (value / most) * (CHART.height - 6)]);
    }
  }
  // The server sends only changes: extend the last value until now.
  if (part.length && now - pairs.at(-1)[0] < WINDOW_SECONDS) part.push([CHART.width, part.at(-1)[1]]);
  if (part.length) parts.push(part);
  const run = (points) => points.map(([x, y]) => `${x} ${y.toFixed(1)}`).join("L");
  return {
    line: parts.map((points) => `M${run(points)}`).join(""),
    area: parts.map((points) => `M${points[0][0]} ${CHART.height}L${run(points)}V${CHART.height}Z`).join(""),
  };
}
