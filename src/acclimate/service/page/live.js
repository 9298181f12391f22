// The event stream. The browser gives up after some errors and never notices a silent line, so we reconnect ourselves.

const SILENCE = 12_000; // a status comes once a second
const LONGEST = 5_000; // between two attempts

/** Open `url` and call `on[name](data)` for each event, and `state("live" | "lost", seconds)` when the line changes. */
export function listen(url, on, state) {
  let source, watchdog, failures = 0;

  function lose() {
    source.close();
    clearTimeout(watchdog);
    const wait = Math.min(LONGEST, 1000 * 2 ** failures++) * (0.75 + Math.random() / 2);
    state("lost", Math.round(wait / 1000) || 1);
    setTimeout(open, wait);
  }

  function heard() {
    clearTimeout(watchdog);
    watchdog = setTimeout(lose, SILENCE);
  }

  function open() {
    source = new EventSource(url);
    source.onerror = lose;
    heard();
    for (const [name, call] of Object.entries(on)) {
      source.addEventListener(name, (event) => {
        heard();
        if (name === "hello") {
          failures = 0;
          state("live");
        }
        call(JSON.parse(event.data));
      });
    }
  }

  open();
}
