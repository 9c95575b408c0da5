// Numbers, times and money as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${UNITS[unit]}`;
}

export const count = (value) => Math.round(value).toLocaleString("en");

// A count with its noun, of which the plural has an s unless it is given.
export const counted = (value, noun, nouns = `${noun}s`) => `${count(value)} ${value === 1 ? noun : nouns}`;

export function rate(value) {
  if (!value) return "0";
  if (value >= 1000) return count(value);
  return value >= 100 ? value.toFixed(0) : value.toFixed(1);
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return value < 60_000 ? `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s` : duration(value / 1000);
}

export function duration(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

export const ago = (at) => duration(Date.now() / 1000 - at);

export function money(nanos, currency = "USD") {
  const value = nanos / 1e9;
  const small = value !== 0 && Math.abs(value) < 0.01;
  const digits = small ? { maximumSignificantDigits: 3 } : { minimumFractionDigits: 2, maximumFractionDigits: Math.abs(value) < 1 ? 4 : 2 };
  try {
    return new Intl.NumberFormat("en", { style: "currency", currency, ...digits }).format(value);
  } catch {
    return `${value.toPrecision(3)} ${currency}`;
  }
}

export const percent = (share) => `${Math.floor(share * 100)} %`;

const pad = (value) => String(value).padStart(2, "0");

export function time(at) {
  const date = new Date(at * 1000);
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  return `${day} ${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
}

// Text to seconds, as on the command line: 90s, 5m, 1h; null if it is none.
export function seconds(text) {
  const found = /^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*$/.exec(text);
  if (!found) return null;
  return Number(found[1]) * { ms: 0.001, s: 1, m: 60, h: 3600, d: 86_400 }[found[2] ?? "s"];
}

export function shortDuration(value) {
  for (const [unit, size] of [["d", 86_400], ["h", 3600], ["m", 60]]) {
    if (value >= size && value % size === 0) return `${value / size}${unit}`;
  }
  return `${value}s`;
}

// A bitmap (base64, little-endian) as bytes.
export function bits(text) {
  const raw = atob(text);
  const found = new Uint8Array(raw.length);
  for (let index = 0; index < raw.length; index += 1) found[index] = raw.charCodeAt(index);
  return found;
}

export const bit = (held, index) => ((held[index >> 3] ?? 0) >> (index & 7)) & 1;

export function ones(held) {
  let sum = 0;
  for (let byte of held) for (; byte; byte &= byte - 1) sum += 1;
  return sum;
}
