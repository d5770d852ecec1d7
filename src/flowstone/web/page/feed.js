// The connection to the dashboard's server: one stream of events, opened again when it was lost, and plain requests.

const BACKOFF_SECONDS_MIN = 0.5;
const BACKOFF_SECONDS_MAX = 15;

/** The JSON at an address of the server; parameters without a value are left out. */
export async function ask(path, parameters = {}, { signal } = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  const answer = await fetch(query ? `${path}?${query}` : path, { signal, headers: { accept: "application/json" } });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

/** Calls `onConnection("connected" | "lost")`, `onState(state)` and `onTransactions(batch)`. */
export class Feed {
  constructor({ onConnection, onState, onTransactions }) {
    this.onConnection = onConnection;
    this.onState = onState;
    this.onTransactions = onTransactions;
    this.backoff = BACKOFF_SECONDS_MIN;
    this.source = null;
    this.timer = null;
  }

  open() {
    this.source?.close();
    const source = new EventSource("api/events");
    this.source = source;
    source.addEventListener("open", () => {
      this.backoff = BACKOFF_SECONDS_MIN;
      this.onConnection("connected");
    });
    source.addEventListener("state", (event) => this.onState(JSON.parse(event.data)));
    source.addEventListener("transactions", (event) => this.onTransactions(JSON.parse(event.data)));
    source.addEventListener("error", () => this.reopen(source));
  }

  /** The browser's own way of trying again neither backs off nor survives a refusal. */
  reopen(source) {
    source.close();
    if (source !== this.source || this.timer !== null) return;
    this.onConnection("lost");
    // Not all pages of a server that comes back knock at the same moment.
    const seconds = this.backoff * (0.5 + Math.random());
    this.backoff = Math.min(this.backoff * 2, BACKOFF_SECONDS_MAX);
    this.timer = setTimeout(() => {
      this.timer = null;
      this.open();
    }, seconds * 1000);
  }
}
