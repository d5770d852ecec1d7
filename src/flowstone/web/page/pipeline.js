// The tables of `flowstone mirror` and their freshness.

import { Keyed, badge, element, mark, say, table, tableRow } from "./dom.js";
import { count, duration, moment, short, vclock } from "./words.js";

const KINDS = { current: "well", behind: "busy", damaged: "bad" };
const LABELS = { current: "current", behind: "lagging", damaged: "damaged" };

export class Pipeline {
  constructor(section) {
    const hint = "No lakes watched; start the dashboard with --lake DIR to show the tables of a lake.";
    this.none = element("p", { class: "quiet" }, hint);
    const { node, body } = table("Delta tables, with the age of the newest settled change in each",
      ["Table", "Space", "Status", "Freshness", "Rows", "Version", "Position"]);
    this.table = node;
    section.append(this.none, node);
    this.rows = new Keyed(body, () => {
      const row = tableRow(7);
      const status = badge();
      row.cells[2].append(status.node);
      const update = (one) => {
        say(row.cells[0], one.table || one.lake);
        mark(row.cells[0], "title", `${one.lake}/${one.table}`);
        say(row.cells[1], one.space ?? "");
        status.update(KINDS[one.status] ?? "quiet", LABELS[one.status] ?? one.status ?? "unknown");
        say(row.cells[3], freshness(one));
        mark(row.cells[3], "title", one.settled_at ? moment(one.settled_at) : null);
        say(row.cells[4], count(one.rows));
        say(row.cells[5], one.version === null ? "unknown" : `v${one.version}`);
        const position = Object.values(one.position).map(vclock).join(" ");
        say(row.cells[6], short(position, 60));
        mark(row.cells[6], "title", position);
      };
      return { node: row.node, update };
    });
  }

  update(tables) {
    mark(this.none, "hidden", tables.length > 0);
    mark(this.table, "hidden", tables.length === 0);
    this.rows.show(tables, (one) => `${one.lake}/${one.table}`);
  }
}

function freshness(one) {
  if (one.age_seconds === null) return "unknown";
  return one.age_seconds === 0 ? "up to date" : `${duration(one.age_seconds)} old`;
}
