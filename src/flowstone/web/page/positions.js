// The positions of all members side by side, shaded by lag.

import { Keyed, element, mark, say } from "./dom.js";
import { count, counted, missing } from "./words.js";

/** Numbers of missing rows from which a cell has the next darker shade. */
const SHADES = [1, 10, 1_000, 100_000];

export class Positions {
  constructor(set) {
    this.head = element("tr");
    this.body = element("tbody");
    const caption = `LSN by member and replica id in ${set.label}`;
    this.node = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      element("table", { class: "heat" }, element("caption", {}, caption), element("thead", {}, this.head), this.body));
    this.columns = new Keyed(this.head, () => {
      const node = element("th", { scope: "col" });
      return { node, update: ({ text }) => say(node, text) };
    });
    this.rows = new Keyed(this.body, () => this.makeRow());
  }

  update(set) {
    this.furthest = set.vclock ?? {};
    this.ids = Object.keys(this.furthest);
    this.columns.show([{ key: "member", text: "Member" }, ...this.ids.map((id) => ({ key: id, text: `id ${id}` })),
      { key: "lag", text: "Lag" }], ({ key }) => key);
    this.rows.show(set.members, (member) => member.uuid);
  }

  makeRow() {
    const name = element("th", { scope: "row" });
    const lag = element("td", { class: "behind" });
    const node = element("tr");
    const ends = { first: { node: name, update: () => {} }, last: { node: lag, update: () => {} } };
    const cells = new Keyed(node, ({ id }) => ends[id] ?? makeCell());
    const update = (member) => {
      const isKnown = Object.keys(member.vclock).length > 0;
      const rows = missing(this.furthest, member.vclock);
      say(name, member.label);
      say(lag, isKnown ? (rows ? counted(rows, "row") : "in sync") : "unknown");
      const has = (id) => (isKnown ? member.vclock[id] ?? 0 : null);
      const components = this.ids.map((id) => ({ id, has: has(id), furthest: this.furthest[id] }));
      cells.show([{ id: "first" }, ...components, { id: "last" }], ({ id }) => id);
    };
    return { node, update };
  }
}

function makeCell() {
  const lsn = element("span", { class: "lsn" });
  const lack = element("span", { class: "lack" });
  const node = element("td", {}, lsn, lack);
  const update = ({ has, furthest }) => {
    const rows = has === null ? 0 : furthest - has;
    mark(node, "data-shade", has === null ? "unknown" : SHADES.filter((from) => rows >= from).length);
    say(lsn, has === null ? "?" : count(has));
    say(lack, rows > 0 ? `−${count(rows)}` : "");
  };
  return { node, update };
}
