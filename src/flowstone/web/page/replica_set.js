// One replica set: its topology, positions, lag, queue and elections, each in a card.

import { element, mark, say } from "./dom.js";
import { Elections } from "./elections.js";
import { Lag } from "./lag.js";
import { Positions } from "./positions.js";
import { Queue } from "./queue.js";
import { Topology } from "./topology.js";
import { hasElections } from "./verdict.js";
import { counted, rate } from "./words.js";

export const sectionId = (set) => `set-${set.uuid ?? "unknown"}`;

export class ReplicaSet {
  constructor(set) {
    this.topology = new Topology(set);
    this.positions = new Positions(set);
    this.lag = new Lag(set);
    this.queue = new Queue(set);
    this.elections = new Elections(set);
    this.title = element("h2", { id: `${sectionId(set)}-title` });
    this.about = element("p", { class: "about" });
    const card = (name, title, part) => element("div", { class: `card ${name}` }, element("h3", {}, title), part.node);
    this.electionsCard = card("full", "Elections", this.elections);
    const attributes = { id: sectionId(set), class: "set", tabindex: "-1", "aria-labelledby": this.title.id };
    this.node = element("section", attributes,
      element("div", { class: "set-head" }, this.title, this.about),
      element("div", { class: "grid" },
        card("wide", "Topology", this.topology), card("side", "Positions", this.positions),
        card("side", "Synchronous queue", this.queue), this.electionsCard,
        card("full", "Lag, last 15 minutes", this.lag)));
  }

  update({ set, now }) {
    say(this.title, set.label);
    say(this.about, about(set));
    mark(this.electionsCard, "hidden", !hasElections(set) && !set.elections?.length);
    for (const part of [this.topology, this.positions, this.queue, this.elections, this.lag]) part.update(set, now);
  }

  close() {
    for (const part of [this.topology, this.elections, this.lag]) part.close();
  }
}

function about(set) {
  const leader = set.members.find((member) => member.is_leader);
  const rows = set.tail?.rows_per_second ?? 0;
  const words = [counted(set.members.length, "member")];
  if (hasElections(set)) words.push(`term ${set.term}`, leader ? `led by ${leader.label}` : "no leader");
  words.push(`${rate(rows)} rows`.replace("/s rows", " rows/s"));
  if (set.uuid) words.push(set.uuid);
  return words.join(" · ");
}
