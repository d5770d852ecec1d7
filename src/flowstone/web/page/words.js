// Formats numbers, times and positions for display.

const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const MINUTE = 60;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;

/** 12,345 */
export function count(number) {
  return number === null || number === undefined ? "unknown" : NUMBER.format(number);
}

/** "1 row", "2 rows"; pass irregular plurals. */
export function counted(number, word, plural = `${word}s`) {
  return `${count(number)} ${number === 1 ? word : plural}`;
}

/** A duration: 0 s, 12 ms, 1.3 s, 4 min 10 s, 3 h 5 min. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds < 0.0005) return "0 s";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < MINUTE) return `${Math.round(seconds)} s`;
  const [large, small, unit, part] = seconds < HOUR ? [MINUTE, 1, "min", "s"]
    : seconds < DAY ? [HOUR, MINUTE, "h", "min"] : [DAY, HOUR, "d", "h"];
  const rest = Math.floor((seconds % large) / small);
  return `${Math.floor(seconds / large)} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
}

/** "3 s ago"; rounded down below a minute, so that the text does not flicker. */
export function ago(seconds) {
  return seconds < 1 ? "just now" : `${duration(seconds < MINUTE ? Math.floor(seconds) : seconds)} ago`
    .replace(/^(\d)\.0 s/, "$1 s");
}

/** Rows per second. */
export function rate(number) {
  if (!number || number < 0.05) return "0/s";
  if (number < 10) return `${number.toFixed(1).replace(/\.0$/, "")}/s`;
  return `${count(number)}/s`;
}

/** {1: 120, 2: 7} */
export function vclock(position) {
  const parts = Object.entries(position ?? {}).map(([id, lsn]) => `${id}: ${lsn}`);
  return `{${parts.join(", ")}}`;
}

/** The number of rows that `target` has and `position` lacks. */
export function missing(target, position) {
  return Object.entries(target ?? {}).reduce((sum, [id, lsn]) => sum + Math.max(0, lsn - (position?.[id] ?? 0)), 0);
}

function two(number) {
  return String(number).padStart(2, "0");
}

/** 03:12:05, in local time. */
export function clock(at) {
  const when = new Date(at * 1000);
  return `${two(when.getHours())}:${two(when.getMinutes())}:${two(when.getSeconds())}`;
}

/** 03:12:05.123 */
export function fineClock(at) {
  return `${clock(at)}.${String(Math.floor((at % 1) * 1000)).padStart(3, "0")}`;
}

/** Date and time in UTC, for tooltips. */
export function moment(at) {
  return new Date(at * 1000).toISOString();
}

/** The text, cut to `length`; put the full text into the tooltip. */
export function short(text, length) {
  return text.length <= length ? text : `${text.slice(0, length - 1)}…`;
}

/** Joins words: a, b and c. */
export function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}
