// Requests to the server, with one sentence where they fail.

/** Return the JSON answer; raise an Error with one sentence for the user where there is none. */
export async function ask(address, options = {}) {
  let answer;
  try {
    answer = await fetch(address, { cache: "no-store", credentials: "same-origin", ...options });
  } catch {
    throw new Error("The server cannot be reached. Check that it runs, and try again.");
  }
  const content = await answer.json().catch(() => null);
  if (answer.ok && content !== null) return content;
  const { status } = answer;
  const reason = typeof content?.error === "string" ? content.error : `The server answered with status ${status}.`;
  const wait = /^\d+$/.exec(answer.headers.get("Retry-After") ?? "");
  throw Object.assign(new Error(status === 503 && wait ? `${reason} Try again in ${wait} s.` : reason), { status });
}
