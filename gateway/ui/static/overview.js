// Overview: how the cluster does now.
import { get, query } from "./api.js";
import { Line } from "./charts.js";
import { bytes, count, counted, ms, money, percent, rate } from "./format.js";
import { html, useEffect } from "./lib.js";
import { Badge, Card, Empty, Notice, Page, Stat, Table, useLoaded } from "./parts.js";
import { state, totals, useCluster } from "./store.js";

const TODAY_MS = 30_000; // between two looks at the ledger

const midnight = () => Math.floor(Date.now() / 86_400_000) * 86_400;

function useToday(me) {
  const may = me.rights.includes("read-usage");
  const today = useLoaded(
    (signal) =>
      may ? get(`admin/usage/report${query({ since: midnight() })}`, { signal }) : Promise.resolve(null),
    [may],
  );
  useEffect(() => {
    const timer = setInterval(() => document.hidden || today.again(), TODAY_MS);
    return () => clearInterval(timer);
  }, []);
  return today;
}

export function functionRows() {
  const rows = new Map();
  for (const [name, one] of state.functions) {
    rows.set(name, { name, ...one, ready: 0, starting: 0, others: 0, requests_s: 0, tokens_s: 0, in_flight: 0, held: 0, ttft_ms: null });
  }
  for (const one of state.instances.values()) {
    const row = rows.get(one.function);
    if (!row || !one.leads) continue;
    if (one.state === "ready") row.ready += 1;
    else if (one.state === "starting" || one.state === "loading") row.starting += 1;
    else row.others += 1;
  }
  for (const one of state.traffic.values()) {
    const row = rows.get(one.function);
    if (!row) continue;
    row.requests_s += one.requests_s;
    row.tokens_s += one.tokens_s;
    row.in_flight += one.in_flight;
    row.held += one.held;
    row.ttft_ms = one.ttft_ms ?? row.ttft_ms;
  }
  return [...rows.values()];
}

export function InstanceCounts({ row }) {
  if (!row.ready && !row.starting && !row.others) return html`<span class="muted">asleep</span>`;
  return html`<span class="counts">
    ${row.ready > 0 && html`<${Badge} tone="good">${row.ready} ready<//>`}
    ${row.starting > 0 && html`<${Badge} tone="info">${row.starting} loading<//>`}
    ${row.others > 0 && html`<${Badge} tone="warn">${row.others} draining<//>`}
  </span>`;
}

function NodeMap() {
  const nodes = [...state.nodes].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
  const busy = new Map();
  for (const one of state.instances.values()) {
    const before = busy.get(one.node);
    const loading = one.state === "starting" || one.state === "loading";
    busy.set(one.node, loading || before === "loading" ? "loading" : "ready");
  }
  const counts = { ready: 0, loading: 0, idle: 0 };
  const cells = nodes.map(([id, node]) => {
    const use = node.state !== "ready" ? "draining" : (busy.get(id) ?? "idle");
    counts[use] = (counts[use] ?? 0) + 1;
    const used = node.gpu_bytes - node.gpu_free_bytes;
    const title = `${id} on ${node.host}: ${use}, ${bytes(used)} of ${bytes(node.gpu_bytes)} used`;
    return html`<li key=${id} class=${`node-cell ${use}`} title=${title}></li>`;
  });
  const said = Object.entries(counts).filter(([, number]) => number).map(([use, number]) => `${number} ${use}`);
  return html`<${Card} title="Nodes" extra=${html`<span class="muted">${nodes.length} in all</span>`}>
    ${nodes.length === 0 && html`<${Empty}>No node has joined.<//>`}
    <ul class="node-map" aria-label=${`Nodes: ${said.join(", ")}`}>${cells}</ul>
    <p class="legend muted">
      <span><i class="node-cell ready"></i>serves</span><span><i class="node-cell loading"></i>loads</span>
      <span><i class="node-cell idle"></i>idle</span><span><i class="node-cell draining"></i>draining</span>
    </p>
  <//>`;
}

function NodeTable() {
  const rows = [...state.nodes].map(([id, node]) => ({ id, ...node })).sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
  const functions = new Map();
  for (const one of state.instances.values()) functions.set(one.node, [...(functions.get(one.node) ?? []), one.function]);
  const memory = (free, all) => (all ? html`${bytes(all - free)}<span class="muted"> of ${bytes(all)}</span>` : "–");
  return html`<${Card} title="Memory">
    <${Table}
      caption="Nodes"
      pageSize=${10}
      keyOf=${(row) => row.id}
      rows=${rows}
      columns=${[
        { label: "Node", cell: (row) => html`<strong>${row.id}</strong>` },
        { label: "Host", cell: (row) => row.host },
        { label: "State", cell: (row) => html`<${Badge}>${row.state}<//>` },
        { label: "Accelerator", cell: (row) => row.gpu_type },
        { label: "Accelerator memory", num: true, cell: (row) => memory(row.gpu_free_bytes, row.gpu_bytes) },
        { label: "Host memory", num: true, cell: (row) => memory(row.host_free_bytes, row.host_bytes) },
        { label: "Functions", cell: (row) => [...new Set(functions.get(row.id) ?? [])].join(", ") || "–" },
      ]}
    />
  <//>`;
}

function Running() {
  const casts = [...state.casts].filter(([, cast]) => cast.running);
  if (!casts.length) return null;
  return html`<${Card} title="Casts in progress">
    <ul class="plain">
      ${casts.map(([id, cast]) => {
        const targets = cast.parts.filter((part) => part.state !== "source");
        const done = targets.filter((part) => part.state === "complete").length;
        return html`<li key=${id}>
          <a href=${`#/casts/${id}`}>${cast.function}:${cast.version}</a>
          <span class="muted"> to ${targets.length} nodes, ${done} complete (${percent(done / Math.max(1, targets.length))})</span>
        </li>`;
      })}
    </ul>
  <//>`;
}

function Watched({ me, today }) {
  useCluster(1000);
  const sum = totals();
  const rows = functionRows();
  const ready = [...state.nodes.values()].filter((node) => node.state === "ready").length;
  const instances = rows.reduce((total, row) => total + row.ready, 0);
  const loading = rows.reduce((total, row) => total + row.starting, 0);
  const seesNodes = me.rights.includes("read-cluster");
  const busiest = rows.sort((a, b) => b.requests_s - a.requests_s || b.ready - a.ready || a.name.localeCompare(b.name)).slice(0, 8);
  return html`<dl class="stats">
      ${seesNodes && html`<${Stat} label="Nodes" value=${`${ready}`} note=${ready === state.nodes.size ? "all ready" : `of ${state.nodes.size}`} />`}
      <${Stat} label="Functions" value=${count(state.functions.size)} note=${`${counted(instances, "instance")} ready${loading ? `, ${loading} loading` : ""}`} />
      <${Stat} label="Requests per second" value=${rate(sum.requests)} note=${`${sum.inFlight} in flight${sum.held ? `, ${sum.held} held` : ""}`} />
      <${Stat} label="Time to first token" value=${ms(sum.ttft)} note="mean of 10 s" />
      <${Today} today=${today} />
    </dl>
    <div class="grid two">
      <${Card}><${Line} label="Requests per second" points=${state.history.map((one) => one.requests)} slots=${120} format=${rate} /><//>
      <${Card}><${Line} label="Tokens per second" points=${state.history.map((one) => one.tokens)} slots=${120} format=${rate} tone="second" /><//>
    </div>
    <${Running} />
    <div class=${seesNodes ? "grid wide-first" : "grid"}>
      <${Card} title="Functions" extra=${html`<a href="#/functions">All functions</a>`}>
        <${Table}
          caption="The busiest functions"
          rows=${busiest}
          keyOf=${(row) => row.name}
          empty="No function is deployed yet: hypercast deploy PATH"
          columns=${[
            { label: "Name", cell: (row) => html`<a href=${`#/functions/${encodeURIComponent(row.name)}`}>${row.name}</a>` },
            { label: "Instances", cell: (row) => html`<${InstanceCounts} row=${row} />` },
            { label: "Requests/s", num: true, cell: (row) => rate(row.requests_s) },
            { label: "Tokens/s", num: true, cell: (row) => rate(row.tokens_s) },
            { label: "TTFT", num: true, cell: (row) => ms(row.ttft_ms) },
          ]}
        />
      <//>
      ${seesNodes && html`<${NodeMap} />`}
    </div>
    ${seesNodes && html`<${NodeTable} />`}`;
}

function Today({ today }) {
  if (today.data === null) return null;
  const rows = today.data.rows;
  const cost = rows.reduce((sum, row) => sum + row.cost_nanos, 0);
  const requests = rows.reduce((sum, row) => sum + row.requests, 0);
  return html`<${Stat} label="Cost today" value=${money(cost, today.data.currency)} note=${`${counted(requests, "request")} (UTC day)`} />`;
}

function Caller({ me, today }) {
  const models = useLoaded(
    (signal) => (me.rights.includes("call") ? get("v1/models", { signal }) : Promise.resolve({ data: [] })),
    [],
  );
  return html`<dl class="stats"><${Today} today=${today} /></dl>
    ${me.rights.includes("call") &&
    html`<${Card} title="Functions that you can call">
      <${Notice} error=${models.error} />
      <ul class="plain">
        ${models.data?.data.map((model) => html`<li key=${model.id}><a href=${`#/functions/${encodeURIComponent(model.id)}/try`}>${model.id}</a></li>`)}
      </ul>
    <//>`}`;
}

export function OverviewPage({ me }) {
  const today = useToday(me);
  return html`<${Page} title="Overview">
    <${Notice} error=${today.error} />
    ${me.rights.includes("read-functions") ? html`<${Watched} me=${me} today=${today} />` : html`<${Caller} me=${me} today=${today} />`}
  <//>`;
}
