// The overall status in one sentence. Pure: takes a state, returns a text and a kind (well, busy or bad).

import { counted, listed } from "./words.js";

const PHRASES_MAX = 3;
const WAITING_SECONDS = 5;

const FOLLOWING = new Set(["follow", "sync"]);
const BROKEN = new Set(["stopped", "disconnected"]);

/** The kind of a link: well, busy (connecting or lagging) or bad. */
export function linkKind(link) {
  if (BROKEN.has(link.status)) return "bad";
  if (!FOLLOWING.has(link.status)) return "busy";
  return link.is_behind ? "busy" : "well";
}

export function hasElections(set) {
  const modes = set.members.map((member) => member.report?.cfg?.election_mode);
  return modes.some((mode) => mode && mode !== "off");
}

/** Members that could not be queried. */
export function unreachable(set) {
  return set.members.filter((member) => member.unreachable);
}

export function verdict(state) {
  const bad = state.sets.flatMap((set) => broken(set, state));
  const busy = [...state.sets.flatMap(slow), ...staleTables(state.pipeline ?? [])];
  // Problems without a phrase of their own are counted as findings.
  if (!bad.length) bad.push(...attention(state, "stopped"));
  for (const severity of ["behind", "warning"]) {
    if (!bad.length && !busy.length) busy.push(...attention(state, severity));
  }
  const told = [...bad, ...busy];
  if (!told.length) return { kind: "well", text: allIsWell(state) };
  const rest = told.length - PHRASES_MAX + 1;
  const shown = rest > 1 ? [...told.slice(0, PHRASES_MAX - 1), `${rest} more`] : told;
  return { kind: bad.length ? "bad" : "busy", text: listed(shown) };
}

function attention(state, severity) {
  const found = (state.findings ?? []).filter((finding) => finding.severity === severity);
  return found.length ? [`${counted(found.length, "finding needs", "findings need")} attention`] : [];
}

function broken(set, state) {
  const lost = unreachable(set);
  const gone = new Set(lost.map((member) => member.uuid));
  const where = state.sets.length > 1 ? ` in ${set.label}` : "";
  // An unreachable member is counted once, not once per link.
  const links = set.links.filter((link) => !gone.has(link.follower));
  const stopped = new Set(links.filter((link) => link.status === "stopped").map((link) => link.follower));
  const cut = links.filter((link) => link.status === "disconnected" && !gone.has(link.master));
  const phrases = [];
  if (stopped.size) phrases.push(`${counted(stopped.size, "replica is", "replicas are")} stopped${where}`);
  if (lost.length) phrases.push(`${counted(lost.length, "member is", "members are")} unreachable${where}`);
  if (cut.length) phrases.push(`${counted(cut.length, "link is", "links are")} disconnected${where}`);
  if (!set.leader && hasElections(set)) phrases.push(`no leader${where}`);
  return phrases;
}

function slow(set) {
  const lagging = new Set(set.links.filter((link) => linkKind(link) === "busy").map((link) => link.follower));
  const phrases = [];
  if (lagging.size) phrases.push(`${counted(lagging.size, "replica is", "replicas are")} lagging`);
  if (set.queue?.len && set.queue.age > WAITING_SECONDS) {
    phrases.push(`${counted(set.queue.len, "transaction is", "transactions are")} waiting for a quorum`);
  }
  return phrases;
}

function staleTables(tables) {
  const stale = tables.filter(({ status }) => ["behind", "damaged"].includes(status));
  return stale.length ? [`${counted(stale.length, "table is", "tables are")} not up to date`] : [];
}

function allIsWell(state) {
  const members = state.sets.reduce((sum, set) => sum + set.members.length, 0);
  if (!members) return "No members found yet";
  const following = state.sets.some((set) => set.links.length) ? "all following" : "all reachable";
  return `${counted(state.sets.length, "set")}, ${counted(members, "member")}, ${following}`;
}
