// What the gateway shows of the cluster, kept up to date by its event stream.
import { ApiError, events, request } from "./api.js";
import { useEffect, useState } from "./lib.js";

const KINDS = ["nodes", "functions", "instances", "live", "casts", "blocks", "layers", "traffic"];
const HISTORY = 120; // seconds
const FIRST_WAIT_MS = 500;
const MAX_WAIT_MS = 8000;

export const state = {
  status: "off", // off, connecting, live, lost
  reason: "",
  at: 0,
  frames: 0,
  history: [], // {requests, tokens}, one a second
  ...Object.fromEntries(KINDS.map((kind) => [kind, new Map()])),
};

const listeners = new Set();
let stop = null;
let sampling = null;
let scheduled = false;

function changed() {
  if (scheduled) return;
  scheduled = true;
  const run = () => {
    scheduled = false;
    for (const listener of [...listeners]) listener();
  };
  // A hidden tab draws nothing, and gets no animation frame.
  if (document.hidden) setTimeout(run, 1000);
  else requestAnimationFrame(run);
}

export function apply(frame) {
  if (frame.full) for (const kind of KINDS) state[kind] = new Map();
  for (const [kind, ids] of Object.entries(frame.gone)) for (const id of ids) state[kind]?.delete(id);
  for (const [kind, entries] of Object.entries(frame.set)) {
    for (const [id, entry] of Object.entries(entries)) state[kind]?.set(id, entry);
  }
  state.at = frame.at;
  state.frames += 1;
}

function sample() {
  const sum = totals();
  state.history.push({ requests: sum.requests, tokens: sum.tokens });
  if (state.history.length > HISTORY) state.history.shift();
  changed();
}

export function totals() {
  const sum = { requests: 0, tokens: 0, inFlight: 0, held: 0, ttft: null };
  let weight = 0;
  for (const one of state.traffic.values()) {
    sum.requests += one.requests_s;
    sum.tokens += one.tokens_s;
    sum.inFlight += one.in_flight;
    sum.held += one.held;
    if (one.ttft_ms !== null) {
      const share = Math.max(one.requests_s, 0.01);
      sum.ttft = ((sum.ttft ?? 0) * weight + one.ttft_ms * share) / (weight + share);
      weight += share;
    }
  }
  return sum;
}

async function follow(signal) {
  let wait = FIRST_WAIT_MS;
  while (!signal.aborted) {
    state.status = "connecting";
    changed();
    try {
      const response = await request("GET", "admin/watch", { signal });
      for await (const { data } of events(response)) {
        if (signal.aborted) return;
        if (data === undefined) continue;
        const frame = JSON.parse(data);
        if (frame.error) throw new ApiError(401, frame.error.code, frame.error.message);
        apply(frame);
        state.status = "live";
        wait = FIRST_WAIT_MS;
        changed();
      }
      state.reason = "The gateway has ended the stream.";
    } catch (error) {
      if (signal.aborted) return;
      state.reason = error.message;
      if (error.status === 403) return;
    }
    state.status = "lost";
    changed();
    await new Promise((done) => setTimeout(done, wait * (0.5 + Math.random() / 2)));
    wait = Math.min(MAX_WAIT_MS, wait * 2);
  }
}

export function start() {
  if (stop) return;
  stop = new AbortController();
  follow(stop.signal);
  sampling = setInterval(sample, 1000);
}

export function end() {
  stop?.abort();
  stop = null;
  clearInterval(sampling);
  state.status = "off";
  state.history = [];
  for (const kind of KINDS) state[kind] = new Map();
}

// Draw the component again when the state has changed, at most every `everyMs`.
export function useCluster(everyMs = 250) {
  const [, draw] = useState(0);
  useEffect(() => {
    let last = 0;
    let timer = null;
    const listener = () => {
      const due = last + everyMs - performance.now();
      if (due <= 0) {
        last = performance.now();
        draw((number) => number + 1);
      } else if (timer === null) {
        timer = setTimeout(() => {
          timer = null;
          last = performance.now();
          draw((number) => number + 1);
        }, due);
      }
    };
    listeners.add(listener);
    return () => {
      listeners.delete(listener);
      clearTimeout(timer);
    };
  }, [everyMs]);
  return state;
}

// For drawing without Preact: call `listener` in an animation frame after each change.
export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function instancesOf(name) {
  return [...state.instances].filter(([, one]) => one.function === name).map(([id, one]) => ({ id, ...one }));
}

export function trafficOf(name) {
  const sum = { requests_s: 0, tokens_s: 0, in_flight: 0, held: 0, ttft_ms: null };
  for (const one of state.traffic.values()) {
    if (one.function !== name) continue;
    sum.requests_s += one.requests_s;
    sum.tokens_s += one.tokens_s;
    sum.in_flight += one.in_flight;
    sum.held += one.held;
    sum.ttft_ms = one.ttft_ms ?? sum.ttft_ms;
  }
  return sum;
}
