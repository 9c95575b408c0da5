// Calls of the gateway's HTTP API. The key is kept in this tab alone, and sent in a header only.

const KEY = "hypercast.key";
const base = new URL(".", document.baseURI);

let onRefused = () => {};

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const storedKey = () => sessionStorage.getItem(KEY);
export const storeKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

// Call `callback` with an error when the gateway refuses the key.
export function whenRefused(callback) {
  onRefused = callback;
}

export const address = () => base.href.replace(/\/$/, "");

// `quiet`: a refused key is no news, since it is being tried.
export async function request(method, path, { body, headers = {}, signal, quiet = false } = {}) {
  const raw = body instanceof Blob;
  let response;
  try {
    response = await fetch(new URL(path, base), {
      method,
      signal,
      headers: {
        authorization: `Bearer ${storedKey() ?? ""}`,
        ...(body === undefined || raw ? {} : { "content-type": "application/json" }),
        ...headers,
      },
      body: body === undefined ? undefined : raw ? body : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The gateway does not answer.");
  }
  if (response.ok) return response;
  const error = await response.json().then((found) => found.error, () => null);
  const refused = new ApiError(response.status, error?.code ?? "", error?.message ?? `HTTP ${response.status}`);
  if (response.status === 401 && !quiet) onRefused(refused);
  throw refused;
}

export const get = async (path, options) => (await request("GET", path, options)).json();
export const send = async (method, path, body) => (await request(method, path, { body })).json();

async function* pieces(response, separator) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (rest + value).split(separator);
      rest = parts.pop();
      yield* parts;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Yield the server-sent events of a response: {data} with text, or {comment}.
export async function* events(response) {
  for await (const piece of pieces(response, "\n\n")) {
    for (const line of piece.split("\n")) {
      if (line.startsWith("data: ")) yield { data: line.slice(6) };
      else if (line.startsWith(": ")) yield { comment: line.slice(2) };
    }
  }
}

export const lines = (response) => pieces(response, "\n");

// Save what an endpoint answers as a file.
export async function download(path, name) {
  const blob = await (await request("GET", path)).blob();
  save(blob, name);
}

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export function query(fields) {
  const given = Object.entries(fields).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
}
