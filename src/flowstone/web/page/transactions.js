// The live tail of the logs: the newest transactions, filtered by the server; each can be opened to show its rows.
//
// The page keeps at most LISTED_MAX transactions. The list does not move while the user reads it.

import { Keyed, badge, element, mark, say, table, tableRow } from "./dom.js";
import { ask } from "./feed.js";
import { clock, count, counted, fineClock, moment, short } from "./words.js";

const LISTED_MIN = 50;
const LISTED_MAX = 500;
const MORE = 100;
const BRIEF_LENGTH = 120;
const TYPING_SECONDS = 0.25;
const REFRESH_SECONDS = 1;
const TYPES = ["INSERT", "REPLACE", "UPDATE", "DELETE", "UPSERT", "NOP", "CONFIRM", "ROLLBACK", "PROMOTE", "DEMOTE"];
const STATUS = { settled: ["well", "settled"], waiting: ["busy", "pending"], rolled_back: ["bad", "rolled back"] };

const NONE_YET = "No transactions yet.";

const keyOf = (one) => `${one.set} ${one.replica_id} ${one.tsn ?? one.lsn}`;

export class Transactions {
  constructor(section) {
    this.listed = [];
    this.limit = LISTED_MIN;
    this.skipped = 0;
    this.newer = 0;
    this.labels = new Map();
    this.unfollowed = [];
    this.isHeld = false;
    this.isStale = false;
    this.request = null;
    this.refreshedAt = 0;
    this.filters = this.makeFilters();
    this.summary = element("p", { class: "summary" });
    this.hold = element("button", { type: "button", class: "newer", hidden: true });
    this.hold.addEventListener("click", () => this.release());
    this.list = element("ol", { class: "transactions", "aria-label": "Transactions, newest first" });
    this.none = element("p", { class: "quiet" }, NONE_YET);
    this.more = element("button", { type: "button", hidden: true }, `Show ${MORE} more`);
    this.more.addEventListener("click", () => {
      this.limit = Math.min(this.limit + MORE, LISTED_MAX);
      this.refresh();
    });
    const tail = element("div", { class: "tail" }, this.summary, this.hold);
    section.append(this.form, tail, this.list, this.none, this.more);
    this.rows = new Keyed(this.list, (one) => this.makeTransaction(one));
    this.list.addEventListener("focusin", () => this.keep());
    this.list.addEventListener("scroll", () => this.list.scrollTop > 0 && this.keep(), { passive: true });
  }

  makeFilters() {
    const set = element("select", { id: "filter-set" }, element("option", { value: "" }, "all sets"));
    const types = TYPES.map((type) => element("option", { value: type }, type));
    const type = element("select", { id: "filter-type" }, element("option", { value: "" }, "all types"), ...types);
    const typed = { autocomplete: "off", spellcheck: "false", maxlength: "200" };
    const space = element("input", { id: "filter-space", type: "text", ...typed });
    const number = { ...typed, maxlength: "9", inputmode: "numeric" };
    const replica = element("input", { id: "filter-replica", type: "text", ...number });
    const text = element("input", { id: "filter-text", type: "search", ...typed });
    const clear = element("p", {}, element("button", { type: "reset" }, "Clear"));
    const field = (label, input) => element("p", {}, element("label", { for: input.id }, label), input);
    this.form = element("form", { class: "filters", role: "search", "aria-label": "Filter transactions" },
      field("Set", set), field("Space", space), field("Type", type), field("Replica id", replica),
      field("Text", text), clear);
    let typing = null;
    const changed = () => {
      clearTimeout(typing);
      typing = setTimeout(() => this.refresh(), TYPING_SECONDS * 1000);
    };
    replica.addEventListener("input", () => {
      replica.value = replica.value.replace(/\D/g, "");
    });
    this.form.addEventListener("input", changed);
    this.form.addEventListener("reset", () => setTimeout(changed));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.refresh();
    });
    return { set, space, type, replica, text };
  }

  get chosen() {
    return Object.fromEntries(Object.entries(this.filters).map(([name, input]) => [name, input.value.trim()]));
  }

  get isFiltered() {
    return Object.values(this.chosen).some(Boolean);
  }

  /** Updates the choice of sets and their labels. */
  name(sets) {
    const known = sets.map((set) => `${set.uuid} ${set.label}`).join("\n");
    this.seen = sets.reduce((sum, set) => sum + (set.tail?.seen ?? 0), 0);
    this.unfollowed = sets.filter(({ tail }) => tail && tail.status !== "following");
    if (known === this.known) return;
    this.known = known;
    this.labels = new Map(sets.map((set) => [set.uuid, set.label]));
    const chosen = this.filters.set.value;
    const options = sets.map((set) => element("option", { value: set.uuid }, set.label));
    this.filters.set.replaceChildren(element("option", { value: "" }, "all sets"), ...options);
    this.filters.set.value = chosen;
  }

  /** Adds a batch of the event stream. With a filter, the batch only triggers a new request to the server. */
  add(batch) {
    this.skipped += batch.skipped ?? 0;
    if (this.isFiltered || this.isHeld) {
      this.newer += batch.transactions.length + (batch.skipped ?? 0);
      this.isStale = true;
      if (this.isHeld) this.revise(batch.transactions);
      return;
    }
    // The response to a request in progress may not include this batch.
    if (this.request !== null) this.isStale = true;
    const known = new Map(this.listed.map((one) => [keyOf(one), one]));
    for (const one of batch.transactions) known.set(keyOf(one), one);
    this.listed = [...known.values()].sort((a, b) => b.at - a.at || b.lsn - a.lsn).slice(0, this.limit);
  }

  /** Updates the status of listed transactions, even while the list is held. */
  revise(transactions) {
    const news = new Map(transactions.map((one) => [keyOf(one), one]));
    this.listed = this.listed.map((one) => news.get(keyOf(one)) ?? one);
  }

  /** Requests the list again, with the current filters. */
  async refresh() {
    this.request?.abort();
    const request = new AbortController();
    this.request = request;
    this.isStale = false;
    this.newer = 0;
    this.refreshedAt = performance.now();
    try {
      const answer = await ask("api/transactions", { ...this.chosen, limit: this.limit }, { signal: request.signal });
      this.listed = answer.transactions;
      this.request = null;
      this.draw();
    } catch (error) {
      if (error.name === "AbortError") return;
      this.request = null;
      this.isStale = true;
    }
  }

  /** Called on every redraw of the page. */
  update() {
    const isDue = performance.now() - this.refreshedAt > REFRESH_SECONDS * 1000;
    if (this.isStale && !this.isHeld && isDue) this.refresh();
    this.draw();
  }

  keep() {
    if (this.isHeld) return;
    this.isHeld = true;
    this.drawSummary();
  }

  release() {
    this.isHeld = false;
    for (const row of this.rows.kept.values()) row.close();
    this.list.scrollTop = 0;
    this.refresh();
  }

  draw() {
    this.rows.show(this.listed, keyOf);
    mark(this.none, "hidden", this.listed.length > 0);
    say(this.none, this.isFiltered ? "No kept transactions match the filter." : NONE_YET);
    mark(this.more, "hidden", this.listed.length < this.limit || this.limit >= LISTED_MAX);
    this.drawSummary();
  }

  drawSummary() {
    const parts = [`${count(this.seen ?? 0)} seen`, `newest ${count(this.listed.length)} listed`];
    if (this.skipped) parts.push(`${count(this.skipped)} skipped (rate limit)`);
    for (const { label, tail } of this.unfollowed) {
      parts.push(`not following the log of ${label}: ${tail.message ?? tail.status}`);
    }
    say(this.summary, parts.join(" · "));
    mark(this.hold, "hidden", !this.isHeld);
    const newer = this.newer ? ` · ${count(this.newer)} newer` : "";
    say(this.hold, `Held while you read${newer} · resume`);
  }

  makeTransaction(first) {
    const status = badge();
    const time = element("time");
    const place = element("span", { class: "place" });
    const brief = element("span", { class: "brief" });
    const attributes = { type: "button", class: "transaction", "aria-expanded": "false" };
    const button = element("button", attributes, status.node, time, place, brief);
    const node = element("li", {}, button);
    let current = first;
    let rows = null;
    const close = () => {
      rows?.remove();
      rows = null;
      mark(button, "aria-expanded", "false");
    };
    button.addEventListener("click", () => {
      if (rows === null) {
        this.keep();
        rows = rowsOf(current);
        node.append(rows);
        mark(button, "aria-expanded", "true");
      } else {
        close();
      }
    });
    const update = (one) => {
      current = one;
      status.update(...(STATUS[one.status] ?? ["quiet", one.status]));
      say(time, fineClock(one.at));
      mark(time, "datetime", moment(one.at));
      const set = this.labels.size > 1 ? this.labels.get(one.set) : null;
      say(place, [set, `replica ${one.replica_id}`, `LSN ${count(one.lsn)}`].filter(Boolean).join(" · "));
      say(brief, briefOf(one));
    };
    return { node, update, close };
  }

  /** Moves the focus in the list: 1 for the next transaction, -1 for the previous one. */
  step(direction) {
    const buttons = [...this.list.querySelectorAll("button.transaction")];
    const at = buttons.indexOf(document.activeElement);
    buttons[Math.max(0, Math.min(buttons.length - 1, at + direction))]?.focus();
  }
}

function briefOf(one) {
  const [first] = one.rows;
  const total = one.rows.length + one.more_rows;
  if (first === undefined) return "no rows";
  const rest = total > 1 ? ` and ${counted(total - 1, "more row")}` : "";
  return `${first.type} ${first.space ?? ""} ${short(first.data, BRIEF_LENGTH)}${rest}`;
}

function rowsOf(one) {
  const caption = `Rows of the transaction of replica ${one.replica_id} at ${clock(one.at)}`;
  const { node, body } = table(caption, ["LSN", "Type", "Space", "Data"]);
  for (const row of one.rows) {
    const { node: line, cells, update } = tableRow(4);
    update([count(row.lsn), row.type, row.space, ""]);
    mark(cells[2], "title", row.space_id === null ? null : `space ${row.space_id}`);
    cells[3].append(element("code", {}, row.data));
    body.append(line);
  }
  if (one.more_rows) node.append(element("p", { class: "quiet" }, `${counted(one.more_rows, "row")} more, not shown`));
  return node;
}
