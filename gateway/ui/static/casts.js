// Casts, and the live picture of one.
import { get, query } from "./api.js";
import { Line } from "./charts.js";
import { ago, bits, bytes, duration, rate, time } from "./format.js";
import { all, Lanes, Legend } from "./lanes.js";
import { html, useEffect, useRef } from "./lib.js";
import { Badge, Card, Empty, Icon, Notice, Page, Stat, Table, useLoaded } from "./parts.js";
import { state, useCluster } from "./store.js";

const NOTHING = new Uint8Array();
const SAMPLES = 240; // of tokens per second, two a second
const DRAW_MS = 60;

// The instance of the cast's function on each node.
function instances(cast) {
  const found = new Map();
  for (const [id, one] of state.instances) {
    if (one.function === cast.function && one.version === cast.version) found.set(one.node, { id, ...one });
  }
  return found;
}

// Numbers of pipelines, which stay while the page is open.
function numbered(pipelines, known) {
  for (const one of pipelines) if (!known.has(one.name)) known.set(one.name, known.size);
  return known;
}

export function lanesOf(id, cast, known) {
  const on = instances(cast);
  const live = state.live.get(`${cast.function}:${cast.version}`);
  const pipelines = live?.pipelines ?? [];
  numbered(pipelines, known);
  let layers = 0;
  let cells = 0;
  for (const one of on.values()) layers = Math.max(layers, state.layers.get(one.id)?.layers ?? 0);
  for (const part of cast.parts) cells = Math.max(cells, state.blocks.get(`${id} ${part.node}`)?.cells ?? 0);
  for (const one of pipelines) for (const stage of one.stages) layers = Math.max(layers, stage.last);
  return {
    layers,
    cells,
    pipelines,
    lanes: cast.parts.map((part) => {
      const instance = on.get(part.node);
      const blocks = state.blocks.get(`${id} ${part.node}`);
      const whole = part.state === "source" || part.state === "complete";
      const serves = instance?.state === "ready" || instance?.state === "draining";
      const reported = instance && state.layers.get(instance.id);
      return {
        node: part.node,
        note: state.nodes.get(part.node)?.host ?? "",
        state: serves ? "ready" : part.state === "running" && instance ? instance.state : part.state,
        whole,
        cells,
        held: blocks ? bits(blocks.held) : NOTHING,
        layers,
        runnable: serves ? all(layers) : reported ? bits(reported.held) : NOTHING,
        stages: pipelines.flatMap((one) =>
          one.stages.filter((stage) => stage.node === part.node).map((stage) => ({ pipeline: known.get(one.name), first: stage.first, last: stage.last })),
        ),
      };
    }),
  };
}

// What is remembered of a cast when its blocks are gone: how many there were, the layers, and tokens per second.
function useMemory(cast) {
  const memory = useRef({ layers: 0, cells: 0, known: new Map(), tokens: [] });
  useEffect(() => {
    const sample = () => {
      const now = state.traffic.get(`${cast.function}:${cast.version}`);
      memory.current.tokens.push(now?.tokens_s ?? 0);
      if (memory.current.tokens.length > SAMPLES) memory.current.tokens.shift();
    };
    const timer = setInterval(sample, 500);
    return () => clearInterval(timer);
  }, [cast.function, cast.version]);
  return memory.current;
}

function Live({ id, cast }) {
  useCluster(DRAW_MS);
  const memory = useMemory(cast);
  const found = lanesOf(id, cast, memory.known);
  memory.layers = Math.max(memory.layers, found.layers);
  memory.cells = Math.max(memory.cells, found.cells);
  const layers = memory.layers || 1;
  const cells = memory.cells || 1;
  const lanes = found.lanes.map((lane) => ({
    ...lane,
    layers,
    cells,
    held: lane.whole ? all(cells) : lane.held,
    runnable: lane.state === "ready" || lane.state === "draining" ? all(layers) : lane.runnable,
  }));
  const targets = cast.parts.filter((part) => part.state !== "source");
  const done = targets.filter((part) => part.state === "complete").length;
  const traffic = state.traffic.get(`${cast.function}:${cast.version}`);
  const live = state.live.get(`${cast.function}:${cast.version}`);
  return html`<dl class="stats">
      <${Stat} label="Complete" value=${`${done} of ${targets.length}`} note=${cast.running ? `for ${duration(Date.now() / 1000 - cast.started_at)}` : "over"} />
      <${Stat} label="Image" value=${bytes(cast.nbytes)} note=${cast.planner} />
      <${Stat} label="Pipelines" value=${found.pipelines.length} note=${live ? live.way : "off"} />
      <${Stat} label="Tokens per second" value=${rate(traffic?.tokens_s ?? 0)} note=${`${traffic?.in_flight ?? 0} in flight${traffic?.held ? `, ${traffic.held} held` : ""}`} />
    </dl>
    <div class="grid wide-first">
      <${Card} title="Nodes" extra=${html`<${Badge}>${cast.running ? "running" : worst(cast.parts)}<//>`}>
        <${Lanes} lanes=${lanes} label=${`Nodes of the cast of ${cast.function}`} />
        <${Legend} blocks pipelines=${memory.known.size} />
      <//>
      <div class="stack">
        <${Card}><${Line} label="Tokens per second" points=${memory.tokens} slots=${SAMPLES} format=${rate} height=${160} tone="second" /><//>
        <${Card} title="Plan">
          <p>${cast.reason}</p>
          ${live && html`<p class="muted">${live.reason}</p>`}
          <p class="muted">${cast.function}:${cast.version}, planned ${time(cast.started_at)}</p>
        <//>
      </div>
    </div>`;
}

function List() {
  useCluster(500);
  const rows = [...state.casts].map(([id, cast]) => ({ id, ...cast })).sort((a, b) => b.started_at - a.started_at);
  return html`<${Card} title="The last hour">
    <${Table}
      caption="Casts"
      pageSize=${20}
      rows=${rows}
      keyOf=${(row) => row.id}
      empty="No cast yet: they begin when a function starts on nodes that lack its model, for example with hypercast scale."
      columns=${[
        { label: "Function", cell: (row) => html`<a href=${`#/casts/${row.id}`}>${row.function}:${row.version}</a>` },
        { label: "State", cell: (row) => html`<${Badge}>${row.running ? "running" : worst(row.parts)}<//>` },
        { label: "Nodes", num: true, cell: (row) => row.parts.filter((part) => part.state !== "source").length },
        { label: "Sources", num: true, cell: (row) => row.parts.filter((part) => part.state === "source").length },
        { label: "Image", num: true, cell: (row) => bytes(row.nbytes) },
        { label: "Planner", cell: (row) => row.planner },
        { label: "Started", num: true, cell: (row) => `${ago(row.started_at)} ago` },
      ]}
    />
  <//>`;
}

function worst(parts) {
  const states = new Set(parts.map((part) => part.state));
  return ["lost", "failed", "cancelled"].find((one) => states.has(one)) ?? "complete";
}

function Details({ id }) {
  const { data, error, again } = useLoaded((signal) => get(`admin/casts${query({ cast: id })}`, { signal }), [id]);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || again(), 3000);
    return () => clearInterval(timer);
  }, [id]);
  const cast = data?.casts[0];
  if (error) return html`<${Notice} error=${error} />`;
  if (!cast) return null;
  const rows = cast.nodes.filter((node) => node.state !== "source");
  return html`<${Card} title="Transfers">
    <${Table}
      caption="Transfers by node"
      pageSize=${16}
      rows=${rows}
      keyOf=${(row) => row.node}
      columns=${[
        { label: "Node", cell: (row) => html`<strong>${row.node}</strong>` },
        { label: "State", cell: (row) => html`<${Badge}>${row.state}<//>${row.error && html`<p class="bad">${row.error}</p>`}` },
        { label: "Blocks", num: true, cell: (row) => `${row.held} of ${row.blocks}` },
        { label: "Time", num: true, cell: (row) => `${row.seconds.toFixed(1)} s` },
        { label: "Rate", num: true, cell: (row) => `${bytes(row.bytes_s)}/s` },
        { label: "Received by", cell: (row) => Object.entries(row.received).map(([name, sum]) => `${name} ${bytes(sum)}`).join(", ") || "–" },
        { label: "Faults", cell: (row) => Object.entries(row.faults).map(([name, number]) => `${number} ${name}`).join(", ") || "none" },
      ]}
    />
  <//>`;
}

export function CastsPage({ me, name: id }) {
  const cluster = useCluster(500);
  const running = [...cluster.casts].filter(([, cast]) => cast.running).sort(([, a], [, b]) => b.started_at - a.started_at);
  const shown = useRef(null);
  const replay = html`<a class="button" href="#/replay">Open a recorded run</a>`;
  if (id) {
    const cast = cluster.casts.get(id);
    return html`<p class="back"><a href="#/casts"><${Icon} name="back" size="16" /> Casts</a></p>
      <${Page} title=${cast ? `Cast of ${cast.function}` : "Cast"}>
        ${cast ? html`<${Live} key=${id} id=${id} cast=${cast} />` : html`<${Empty}>This cast is not among the latest 64.<//>`}
        ${me.rights.includes("read-cluster") && html`<${Details} key=${`details ${id}`} id=${id} />`}
      <//>`;
  }
  // One that has just ended stays until the next begins, or the page is left.
  shown.current = running[0]?.[0] ?? (cluster.casts.has(shown.current) ? shown.current : null);
  const first = shown.current;
  return html`<${Page} title="Casts" intro="A model reaches many nodes at once, and answers while it does." actions=${replay}>
    ${first && html`<${Live} key=${first} id=${first} cast=${cluster.casts.get(first)} />`}
    <${List} />
  <//>`;
}
