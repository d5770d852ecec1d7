// The synchronous queue (the limbo): its owner, and the transactions that wait for a quorum.

import { Keyed, element, mark, say, table, tableRow } from "./dom.js";
import { count, counted, duration, short } from "./words.js";

const SHOWN_MAX = 20;
const ROWS_SHOWN_MAX = 3;
const KEY_LENGTH = 60;

export class Queue {
  constructor(set) {
    this.summary = element("p", { class: "summary" });
    const { node, body } = table(`Pending transactions of ${set.label}`, ["Transaction", "Age", "Rows"]);
    this.table = node;
    this.more = element("p", { class: "quiet" });
    this.node = element("div", { class: "queue" }, this.summary, node, this.more);
    this.rows = new Keyed(body, () => {
      const row = tableRow(3);
      const name = (one) => `replica ${one.replica_id}, LSN ${count(one.lsn)}`;
      return { node: row.node, update: (one) => row.update([name(one), duration(one.age), rowsText(one.rows)]) };
    });
  }

  update(set) {
    const waiting = set.waiting ?? [];
    say(this.summary, summaryOf(set));
    mark(this.table, "hidden", waiting.length === 0);
    this.rows.show(waiting.slice(0, SHOWN_MAX), (one) => `${one.replica_id} ${one.lsn}`);
    const rest = Math.max(set.queue?.len ?? 0, waiting.length) - Math.min(waiting.length, SHOWN_MAX);
    mark(this.more, "hidden", rest <= 0);
    say(this.more, `${counted(rest, "more", "more")}, not listed`);
  }
}

function summaryOf(set) {
  const { queue } = set;
  if (!queue) return "No member reports a synchronous queue.";
  const owner = set.members.find((member) => member.id === queue.owner && queue.owner);
  const words = [queue.owner ? `owned by ${owner?.label ?? `replica ${queue.owner}`}` : "no owner"];
  if (queue.quorum !== null) words.push(`quorum ${queue.quorum}`);
  if (queue.term) words.push(`term ${queue.term}`);
  if (queue.len && queue.age !== null) words.push(`oldest pending for ${duration(queue.age)}`);
  if (queue.confirm_lag) words.push(`last confirmed after ${duration(queue.confirm_lag)}`);
  if (queue.rollback_count) words.push(`${counted(queue.rollback_count, "rollback")} since start`);
  const length = queue.len ? `${counted(queue.len, "transaction")} pending` : "Queue is empty";
  return `${length}; ${words.join(", ")}.`;
}

function rowsText(rows) {
  const words = (row) => [row.type, row.space, short(row.key, KEY_LENGTH)].filter(Boolean).join(" ");
  const shown = rows.slice(0, ROWS_SHOWN_MAX).map(words);
  const rest = rows.length - shown.length;
  return rest > 0 ? `${shown.join("; ")}; ${rest} more` : shown.join("; ");
}
