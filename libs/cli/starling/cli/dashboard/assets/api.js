// Requests to the server, all with the token, and the stream of changes.

const KEY = "starling-token";

/** Take the token from the address, and out of it, so that it is in no history and no screenshot. */
export function findToken() {
  const found = /[#&]token=([A-Za-z0-9_-]+)/.exec(location.hash);
  if (found) {
    localStorage.setItem(KEY, found[1]);
    history.replaceState(null, "", location.pathname);
  }
  return localStorage.getItem(KEY) ?? "";
}

export function keepToken(token) {
  localStorage.setItem(KEY, token);
}

export class ApiError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

function headers() {
  return { authorization: `Bearer ${localStorage.getItem(KEY) ?? ""}` };
}

async function checked(response) {
  if (!response.ok) throw new ApiError(response.status, (await response.text()).slice(0, 500));
  return response;
}

/** Return the answer to a question about a run, or about all with an empty run. */
export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== undefined && value !== null && value !== "") query.set(name, value);
  }
  const address = query.size ? `/api/${path}?${query}` : `/api/${path}`;
  return (await checked(await fetch(address, { headers: headers(), signal }))).json();
}

export async function getBlob(path, parameters) {
  const response = await checked(await fetch(`/api/${path}?${new URLSearchParams(parameters)}`, { headers: headers() }));
  return response.blob();
}

export async function post(path, value) {
  const options = {
    method: "POST", headers: { ...headers(), "content-type": "application/json" }, body: JSON.stringify(value),
  };
  return (await checked(await fetch(`/api/${path}`, options))).json();
}

/** Follow the server-sent events, and connect again when they end. EventSource cannot send the token in a header. */
export async function follow(onrun, onlink) {
  for (;;) {
    try {
      const response = await checked(await fetch("/api/live", { headers: headers() }));
      onlink(true);
      await read(response.body.getReader(), onrun);
      onlink(false, "The dashboard has stopped");
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) throw error;
      onlink(false, error instanceof ApiError ? error.message : "No connection to the dashboard");
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

async function read(reader, onrun) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) onrun(JSON.parse(data));
    }
  }
}
