// The connection to the dashboard's server: an event stream that reconnects, and plain requests.

const BACKOFF_SECONDS_MIN = 0.5;
const BACKOFF_SECONDS_MAX = 15;

/** Fetches JSON from a path of the server; omits parameters without a value. */
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

  /** Reconnects with backoff: the browser's own retry does not back off, and stops after an HTTP error. */
  reopen(source) {
    source.close();
    if (source !== this.source || this.timer !== null) return;
    this.onConnection("lost");
    // Jitter, so that not all pages reconnect to a restarted server at the same time.
    const seconds = this.backoff * (0.5 + Math.random());
    this.backoff = Math.min(this.backoff * 2, BACKOFF_SECONDS_MAX);
    this.timer = setTimeout(() => {
      this.timer = null;
      this.open();
    }, seconds * 1000);
  }
}
