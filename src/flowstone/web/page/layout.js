// The layout of the topology graph. Pure: takes a set and the available width, returns positions and paths.
//
// Members are on a ring if there is room, else in a column with straight lines between neighbours and arcs otherwise.

const BOX = {
  large: { width: 204, height: 86 },
  small: { width: 172, height: 74 },
  column: { width: 176, height: 78 },
};
const COLUMN_WIDTH_MAX = 560;
const LARGE_MEMBERS_MAX = 6;
const RING_MEMBERS_MAX = 12;
const MARGIN = 14;
/** How far a link bows out, so that it does not overlap the link in the opposite direction. */
const BOW = 34;
const ARROW = 9;
const GAP = { start: 2, end: 4 + ARROW };
const ROOM = 30;

/** `{height, nodes: [{member, x, y, size}], edges: [{link, path, arrow, label, names, isExplained}]}` */
export function place(set, width) {
  const { length } = set.members;
  const isColumn = length > RING_MEMBERS_MAX || (width < COLUMN_WIDTH_MAX && length > 1);
  const { height, nodes } = isColumn ? column(set.members, width) : ring(set.members, width);
  const byUuid = new Map(nodes.map((node) => [node.member.uuid, node]));
  const edges = set.links.filter(({ follower, master }) => byUuid.has(follower) && byUuid.has(master)).map((link) => {
    const [from, to] = [byUuid.get(link.master), byUuid.get(link.follower)];
    return {
      link, ...(isColumn ? aside(from, to, width) : bowed(from, to, nodes.length)),
      names: { follower: to.member.label, master: from.member.label },
      // The box of an unreachable member already shows the reason.
      isExplained: Boolean(from.member.unreachable || to.member.unreachable),
    };
  });
  return { height, nodes, edges };
}

function ring(members, width) {
  const total = members.length;
  const size = total > LARGE_MEMBERS_MAX ? BOX.small : BOX.large;
  const radius = {
    x: Math.min((width - size.width) / 2 - 2, total > 2 ? 330 : 250),
    y: total > 2 ? Math.max(total === 3 ? 170 : 140, total * 34) : 0,
  };
  const turn = { 2: 180, 4: 225 }[total] ?? -90;
  const nodes = members.map((member, at) => {
    const angle = ((turn + (360 * at) / total) * Math.PI) / 180;
    const reach = total === 1 ? 0 : 1;
    return { member, size, x: width / 2 + reach * radius.x * Math.cos(angle), y: reach * radius.y * Math.sin(angle) };
  });
  const heights = nodes.map(({ y }) => y);
  // Two members are side by side, with the labels of their links above and below.
  const margin = MARGIN + (total === 2 ? 20 : 0);
  const top = Math.min(...heights) - size.height / 2 - margin;
  for (const node of nodes) node.y -= top;
  return { height: Math.ceil(Math.max(...heights) + size.height / 2 + margin - top), nodes };
}

function column(members, width) {
  const size = BOX.column;
  const step = size.height + 58;
  const top = MARGIN + size.height / 2;
  const nodes = members.map((member, row) => ({ member, size, row, x: width / 2, y: top + row * step }));
  return { height: MARGIN * 2 + size.height + (members.length - 1) * step, nodes };
}

/** The path on a ring: a curve on the right-hand side of the line from master to follower. */
function bowed(from, to, total) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const side = { x: -dy / length, y: dx / length };
  const middle = { x: (from.x + to.x) / 2 + side.x * BOW, y: (from.y + to.y) / 2 + side.y * BOW };
  const start = border(from, middle, side, GAP.start);
  const end = border(to, middle, side, GAP.end);
  const at = curvePoint(start, middle, end, total > 3 ? 0.62 : 0.5);
  const anchor = side.x > 0.3 ? "start" : side.x < -0.3 ? "end" : "middle";
  const lift = side.y < -0.5 ? -14 : side.y > 0.5 ? 8 : -2;
  const away = anchor === "middle" ? 16 : 10;
  const label = { anchor, room: ROOM, x: at.x + side.x * 10, y: at.y + side.y * away + lift };
  return { label, path: `M${point(start)} Q${point(middle)} ${point(end)}`, arrow: arrow(middle, end) };
}

/** The path in a column: downward links are on the right, upward links on the left. */
function aside(from, to, width) {
  const down = Math.sign(to.row - from.row);
  if (Math.abs(to.row - from.row) === 1) {
    const x = from.x + down * 22;
    const start = { x, y: from.y + down * (from.size.height / 2 + GAP.start) };
    const end = { x, y: to.y - down * (to.size.height / 2 + GAP.end) };
    const label = { anchor: down > 0 ? "start" : "end", room: 14, x: x + down * 9, y: (from.y + to.y) / 2 };
    return { label, path: `M${point(start)} L${point(end)}`, arrow: arrow(start, end) };
  }
  const edge = down * (from.size.width / 2);
  const reach = Math.min((width - from.size.width) / 2 - 3, 10 + 9 * Math.abs(to.row - from.row));
  const start = { x: from.x + edge + down * GAP.start, y: from.y + 8 * down };
  const end = { x: to.x + edge + down * GAP.end, y: to.y - 8 * down };
  const bow = from.x + edge + down * (reach * 1.33);
  const [leave, arrive] = [{ x: bow, y: start.y + 30 * down }, { x: bow, y: end.y - 30 * down }];
  const label = { anchor: "middle", room: 0, x: bow - down * reach * 0.3, y: (from.y + to.y) / 2 };
  const path = `M${point(start)} C${point(leave)} ${point(arrive)} ${point(end)}`;
  return { label, path, arrow: arrow({ x: end.x + down * 10, y: end.y - 6 * down }, end) };
}

function point({ x, y }) {
  return `${x.toFixed(1)} ${y.toFixed(1)}`;
}

/** The head of an arrow at `end` that points away from `origin`. */
function arrow(origin, end) {
  const length = Math.hypot(end.x - origin.x, end.y - origin.y) || 1;
  const ahead = { x: (end.x - origin.x) / length, y: (end.y - origin.y) / length };
  const tip = { x: end.x + ahead.x * ARROW, y: end.y + ahead.y * ARROW };
  const left = { x: end.x - ahead.y * 5, y: end.y + ahead.x * 5 };
  const right = { x: end.x + ahead.y * 5, y: end.y - ahead.x * 5 };
  return `M${point(tip)} L${point(left)} L${point(right)}Z`;
}

function curvePoint(start, middle, end, t) {
  const mix = (name) => (1 - t) ** 2 * start[name] + 2 * t * (1 - t) * middle[name] + t ** 2 * end[name];
  return { x: mix("x"), y: mix("y") };
}

/** The point at which the line towards `aim` leaves the box of a node, plus `gap`. */
function border(node, aim, side, gap) {
  const origin = { x: node.x + side.x * 10, y: node.y + side.y * 10 };
  const [dx, dy] = [aim.x - origin.x, aim.y - origin.y];
  const reach = (half, offset, delta) => (delta ? (half - Math.sign(delta) * offset) / Math.abs(delta) : Infinity);
  const across = reach(node.size.width / 2, origin.x - node.x, dx);
  const share = Math.min(across, reach(node.size.height / 2, origin.y - node.y, dy));
  const way = share + gap / (Math.hypot(dx, dy) || 1);
  return { x: origin.x + dx * way, y: origin.y + dy * way };
}
