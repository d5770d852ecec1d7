// The topology of a replica set as a graph, and the same as tables. `layout.js` computes the positions.

import { Keyed, badge, drawn, element, mark, say, table, tableRow } from "./dom.js";
import { place } from "./layout.js";
import { linkKind } from "./verdict.js";
import { count, counted, duration, rate, short, vclock } from "./words.js";

const LABELS_MEMBERS_MAX = 4;
const REASON_LENGTH = 26;
const STROKE = { least: 1.5, perDecade: 1.1 };
const DASH_SECONDS = { slowest: 3, fastest: 0.5 };

/** Average letter width of each of the four lines in a box; the last line is monospaced. */
const LETTER_WIDTHS = [8, 6.5, 6.5, 6.7];

const MODES = { rw: "rw", read: "ro", unknown: "not queried" };
const SIGNS = { leader: "★", gone: "✕", unknown: "?", member: "●" };

/** The key of `SIGNS` for a member. */
function standing(member) {
  if (member.unreachable) return "gone";
  if (member.is_leader) return "leader";
  return member.report ? "member" : "unknown";
}

function role(member) {
  const { report, unreachable } = member;
  const words = [member.id ? `id ${member.id}` : "anonymous"];
  if (member.is_leader) words.push("leader");
  else if (report?.election && report.cfg?.election_mode !== "off") words.push(report.election.state);
  if (unreachable) words.push(unreachable.is_denied ? "access denied" : "unreachable");
  else words.push(MODES[member.mode]);
  return words.join(" · ");
}

function version(member) {
  const { report } = member;
  if (!report) return member.unreachable ? member.unreachable.reason : "reported by peers";
  const status = report.status === "running" ? "" : ` · ${report.status}`;
  return `${report.package} ${report.version.split("-")[0]}${status}`;
}

const linkKey = (link) => `${link.follower} ${link.master}`;

function lagText(link) {
  if (link.lag_lsn === null && link.lag === null) return "lag unknown";
  if (link.lag_lsn === null) return duration(link.lag);
  return `${duration(link.lag)} · ${counted(link.lag_lsn, "row")}`;
}

export class Topology {
  constructor(set) {
    this.set = set;
    this.selected = null;
    this.width = 0;
    this.svg = drawn("svg", { class: "graph", role: "group", "aria-label": `Topology of ${set.label}` });
    const edges = drawn("g", { class: "edges" });
    const labels = drawn("g", { class: "labels", "aria-hidden": "true" });
    const nodes = drawn("g", { class: "nodes" });
    this.svg.append(edges, labels, nodes);
    this.edges = new Keyed(edges, () => this.makeEdge());
    this.labels = new Keyed(labels, () => this.makeLabel());
    this.nodes = new Keyed(nodes, ({ member }) => this.makeNode(member.uuid));
    this.details = element("div", { class: "member", hidden: true });
    this.links = new LinkTable(set);
    this.members = new MemberTable(set);
    const tables = element("details", { class: "as-table" }, element("summary", {}, "As tables"),
      this.members.node, this.links.node);
    const legend = "Arrows show the direction of replication; labels show lag.";
    this.node = element("div", { class: "topology" },
      this.svg, element("p", { class: "legend" }, legend), this.details, tables);
    this.observer = new ResizeObserver(([entry]) => {
      const width = Math.round(entry.contentRect.width);
      if (width && Math.abs(width - this.width) > 2) {
        this.width = width;
        this.draw();
      }
    });
    this.observer.observe(this.node);
  }

  update(set) {
    this.set = set;
    this.links.update(set);
    this.members.update(set);
    if (this.width) this.draw();
    this.describe();
  }

  close() {
    this.observer.disconnect();
  }

  draw() {
    const { height, nodes, edges } = place(this.set, this.width);
    mark(this.svg, "viewBox", `0 0 ${this.width} ${height}`);
    mark(this.svg, "height", height);
    mark(this.svg, "width", this.width);
    mark(this.svg, "data-dense", nodes.length > LABELS_MEMBERS_MAX);
    this.edges.show(edges, ({ link }) => linkKey(link));
    this.labels.show(edges.filter(({ link }) => this.isLabelled(link)), ({ link }) => linkKey(link));
    this.nodes.show(nodes, ({ member }) => member.uuid);
  }

  /** With few members all links are labelled; with many, only those of the selected member or with a problem. */
  isLabelled(link) {
    if (this.selected) return link.follower === this.selected || link.master === this.selected;
    return linkKind(link) !== "well" || this.set.members.length <= LABELS_MEMBERS_MAX;
  }

  makeEdge() {
    const line = drawn("path", { class: "line" });
    const flow = drawn("path", { class: "flow" });
    const head = drawn("path", { class: "head" });
    const title = drawn("title");
    const node = drawn("g", { class: "edge" }, title, line, flow, head);
    const update = ({ link, path, arrow, names }) => {
      const rows = link.rows_per_second ?? 0;
      mark(node, "data-kind", linkKind(link));
      mark(line, "d", path);
      mark(flow, "d", path);
      mark(head, "d", arrow);
      const width = STROKE.least + STROKE.perDecade * Math.log10(1 + rows);
      line.style.strokeWidth = `${width.toFixed(2)}px`;
      flow.style.strokeWidth = `${Math.max(2, width).toFixed(2)}px`;
      mark(node, "data-flows", rows > 0 && linkKind(link) !== "bad");
      const seconds = Math.max(DASH_SECONDS.fastest, DASH_SECONDS.slowest - 0.6 * Math.log10(1 + rows));
      // Changing the duration makes the dashes jump, so it changes in visible steps only.
      flow.style.animationDuration = `${(Math.round(seconds * 2) / 2).toFixed(1)}s`;
      mark(node, "data-faded", this.selected !== null && !this.isLabelled(link));
      const facts = [link.status, lagText(link), rate(rows), link.message].filter(Boolean).join(", ");
      say(title, `${names.follower} follows ${names.master}: ${facts}`);
    };
    return { node, update };
  }

  makeLabel() {
    const first = drawn("tspan");
    const second = drawn("tspan", { dy: "1.25em" });
    const node = drawn("text", { class: "label" }, first, second);
    const update = ({ link, label, isExplained }) => {
      const rows = link.rows_per_second ?? 0;
      const kind = linkKind(link);
      mark(node, "data-kind", kind);
      mark(node, "text-anchor", label.anchor);
      for (const part of [node, first, second]) mark(part, "x", label.x.toFixed(1));
      mark(node, "y", label.y.toFixed(1));
      const isBroken = kind === "bad" || !["follow", "sync"].includes(link.status);
      const sign = { bad: "✕ ", busy: "▲ ", well: "" }[kind];
      const isTight = label.room < REASON_LENGTH;
      const reason = isExplained || isTight ? "" : short(link.message ?? lagText(link), REASON_LENGTH);
      const lag = isTight && link.lag_lsn > 0 ? duration(link.lag) : lagText(link);
      const more = lag === lagText(link) ? (rows > 0 ? rate(rows) : "") : counted(link.lag_lsn, "row");
      const lines = isBroken ? [`${sign}${link.status}`, reason] : [`${sign}${lag}`, more];
      say(first, label.room ? lines[0] : sign.trim());
      say(second, label.room ? lines[1] : "");
    };
    return { node, update };
  }

  makeNode(uuid) {
    const box = drawn("rect", { class: "box", rx: 8 });
    const stripe = drawn("rect", { class: "stripe", width: 5, rx: 2.5 });
    const sign = drawn("text", { class: "sign", "aria-hidden": "true" });
    const lines = ["name", "role", "version", "position"].map((name) => drawn("text", { class: name }));
    const node = drawn("g", { class: "node", tabindex: "0", role: "button", "aria-pressed": "false" },
      box, stripe, sign, ...lines);
    const toggle = () => this.select(this.selected === uuid ? null : uuid);
    node.addEventListener("click", toggle);
    node.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        toggle();
      }
    });
    const update = ({ member, x, y, size }) => {
      const kind = standing(member);
      const texts = [member.label, role(member), version(member), vclock(member.vclock)];
      mark(node, "data-standing", kind);
      mark(node, "aria-pressed", this.selected === member.uuid ? "true" : "false");
      mark(node, "aria-label", texts.join(", "));
      mark(node, "transform", `translate(${x - size.width / 2} ${y - size.height / 2})`);
      mark(box, "width", size.width);
      mark(box, "height", size.height);
      mark(stripe, "x", 6);
      mark(stripe, "y", 8);
      mark(stripe, "height", size.height - 16);
      mark(sign, "x", size.width - 12);
      mark(sign, "y", 21);
      say(sign, SIGNS[kind]);
      lines.forEach((line, at) => {
        mark(line, "x", 18);
        mark(line, "y", 21 + at * ((size.height - 30) / 3));
        say(line, short(texts[at], Math.floor((size.width - (at ? 24 : 46)) / LETTER_WIDTHS[at])));
      });
    };
    return { node, update };
  }

  select(uuid) {
    this.selected = uuid;
    this.draw();
    this.describe();
  }

  /** Shows the details of the selected member below the graph. */
  describe() {
    const member = this.set.members.find((one) => one.uuid === this.selected);
    mark(this.details, "hidden", member === undefined);
    if (member === undefined) return;
    const facts = factsOf(member, this.set);
    if (this.facts === undefined) {
      const list = element("dl", { class: "facts" });
      this.detailsTitle = element("h4");
      this.details.append(this.detailsTitle, list);
      this.facts = new Keyed(list, () => {
        const [name, value] = [element("dt"), element("dd")];
        const node = element("div", {}, name, value);
        return { node, update: ([label, text]) => { say(name, label); say(value, text); } };
      });
    }
    say(this.detailsTitle, member.label);
    this.facts.show(facts, ([label]) => label);
  }
}

function factsOf(member, set) {
  const { report, unreachable } = member;
  const address = member.address ?? "unknown";
  const facts = [["instance", member.uuid], ["address", address], ["vclock", vclock(member.vclock)]];
  if (unreachable) facts.push(["unreachable", unreachable.reason], ["hint", unreachable.hint ?? "none"]);
  if (!report) return facts;
  facts.push(["version", `${report.package} ${report.version}`], ["status", report.status],
    ["read-only", report.ro ? `yes${report.ro_reason ? `: ${report.ro_reason}` : ""}` : "no"],
    ["uptime", duration(report.uptime)], ["rows per second", rate(set.rows_per_second?.[member.uuid])]);
  if (report.election) {
    const { state, term, vote } = report.election;
    facts.push(["election", `${state}, term ${term}, ${vote ? `voted for ${vote}` : "no vote"}`]);
  }
  if (report.gc) {
    const holders = report.gc.consumers.map((one) => `${one.name} from ${vclock(one.vclock)}`);
    facts.push(["logs retained from", vclock(report.gc.vclock)], ["retained for", holders.join("; ") || "none"],
      ["snapshots", count(report.gc.checkpoints.length)]);
  }
  const options = Object.entries(report.cfg ?? {}).map(([name, value]) => `${name} = ${value}`);
  if (options.length) facts.push(["options", options.join(", ")]);
  return facts;
}

class MemberTable {
  constructor(set) {
    const headings = ["Member", "Id", "Role", "Mode", "Version", "Rows/s", "Position"];
    const { node, body } = table(`Members of ${set.label}`, headings);
    this.node = node;
    this.rows = new Keyed(body, () => {
      const row = tableRow(headings.length);
      return { node: row.node, update: (member) => row.update(this.texts(member)) };
    });
  }

  texts(member) {
    const standing = member.is_leader ? "leader" : member.report?.election?.state ?? "member";
    const mode = member.unreachable ? `unreachable: ${member.unreachable.reason}` : MODES[member.mode];
    const rows = rate(this.rates[member.uuid]);
    return [member.label, member.id || "anonymous", standing, mode, version(member), rows, vclock(member.vclock)];
  }

  update(set) {
    this.rates = set.rows_per_second ?? {};
    this.rows.show(set.members, (member) => member.uuid);
  }
}

class LinkTable {
  constructor(set) {
    const headings = ["Follower", "Upstream", "Status", "Lag", "Lag (rows)", "Idle", "Rows/s", "Message"];
    const { node, body } = table(`Links of ${set.label}`, headings);
    this.node = node;
    this.rows = new Keyed(body, () => {
      const row = tableRow(headings.length);
      const status = badge();
      row.cells[2].append(status.node);
      const update = (link) => {
        say(row.cells[0], this.names.get(link.follower) ?? link.follower);
        say(row.cells[1], this.names.get(link.master) ?? link.master);
        status.update(linkKind(link), link.status);
        say(row.cells[3], duration(link.lag));
        say(row.cells[4], count(link.lag_lsn));
        say(row.cells[5], duration(link.idle));
        say(row.cells[6], rate(link.rows_per_second));
        say(row.cells[7], link.message ?? "");
      };
      return { node: row.node, update };
    });
  }

  update(set) {
    this.names = new Map(set.members.map((member) => [member.uuid, member.label]));
    this.rows.show(set.links, linkKey);
  }
}
