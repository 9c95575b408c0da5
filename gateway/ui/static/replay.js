// Play a recorded run of `python -m benchmarks.live_picture --json FILE`.
import { bytes, rate } from "./format.js";
import { all, fromNumber, Lanes, Legend } from "./lanes.js";
import { html, useEffect, useMemo, useRef, useState } from "./lib.js";
import { Card, Icon, Notice, Page, Stat } from "./parts.js";

const BIN_S = 0.5;
const MAX_BYTES = 64 << 20;
const SPEEDS = [0.5, 1, 2, 4];
const NOTHING = new Uint8Array();

// Read a file of records; numbers of more than 53 bits (layers) stay exact as text.
export function parse(text) {
  const records = JSON.parse(text.replace(/("layers":\s*)(\d{15,})/g, '$1"$2"'));
  const record = (Array.isArray(records) ? records : [records]).find((one) => Array.isArray(one?.events) && Array.isArray(one?.answers));
  if (!record) throw new Error("This file has no recorded run: it is made by python -m benchmarks.live_picture --json FILE.");
  const events = record.events.filter((event) => typeof event?.at_s === "number").sort((a, b) => a.at_s - b.at_s);
  const arrived = record.answers.flatMap((answer) => answer.arrived_s ?? []);
  const end = Math.max(...events.map((event) => event.at_s), ...arrived.slice(-1), arrived.reduce((most, at) => Math.max(most, at), 0), 1);
  const nodes = [...new Set(events.filter((event) => event.node).map((event) => event.node))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  let layers = 1;
  for (const event of events) {
    if (event.kind === "held") layers = Math.max(layers, BigInt(event.layers).toString(2).length);
    if (event.kind === "live") for (const one of event.pipelines) for (const stage of one.stages) layers = Math.max(layers, stage.last);
  }
  const bins = new Array(Math.ceil(end / BIN_S)).fill(0);
  for (const at of arrived) if (at >= 0) bins[Math.min(bins.length - 1, Math.floor(at / BIN_S))] += 1 / BIN_S;
  const names = new Map();
  for (const event of events) {
    if (event.kind === "live") for (const one of event.pipelines) {
      const name = `${one.pipeline_id}.${one.epoch}`;
      if (!names.has(name)) names.set(name, names.size);
    }
  }
  return { params: record.params ?? {}, first: record.first_token ?? null, events, answers: record.answers, end, nodes, layers, bins, names };
}

// What was so at `at`: the fold of all events until then.
export function stateAt(run, at) {
  const nodes = new Map(run.nodes.map((node) => [node, { state: "waiting", runnable: NOTHING, cells: 0, held: NOTHING }]));
  let live = { way: "", reason: "", pipelines: [] };
  for (const event of run.events) {
    if (event.at_s > at) break;
    const node = nodes.get(event.node);
    if (event.kind === "instance" && node) node.state = event.state;
    else if (event.kind === "held" && node) node.runnable = fromNumber(event.layers);
    else if (event.kind === "blocks" && node) {
      node.cells = event.cells;
      node.held = Uint8Array.from(atob(event.held), (one) => one.charCodeAt(0));
    } else if (event.kind === "live") live = event;
  }
  const cells = run.events.find((event) => event.kind === "blocks")?.cells ?? 0;
  const lanes = [...nodes].map(([node, one]) => {
    const serves = one.state === "ready" || one.state === "draining";
    return {
      node,
      note: "",
      state: one.state,
      cells,
      held: serves ? all(cells) : one.held,
      layers: run.layers,
      runnable: serves ? all(run.layers) : one.runnable,
      stages: live.pipelines.flatMap((pipeline) =>
        pipeline.stages
          .filter((stage) => stage.node === node)
          .map((stage) => ({ pipeline: run.names.get(`${pipeline.pipeline_id}.${pipeline.epoch}`), first: stage.first, last: stage.last })),
      ),
    };
  });
  return { lanes, live, ready: lanes.filter((lane) => lane.state === "ready").length };
}

function Tokens({ run, at, onSeek }) {
  const W = 600;
  const H = 130;
  const most = Math.max(...run.bins, 1);
  const wide = W / run.bins.length;
  const firsts = run.answers.filter((answer) => answer.start_kind === "live" && answer.arrived_s?.length).map((answer) => answer.arrived_s[0]);
  const first = firsts.length ? Math.min(...firsts) : null;
  const x = (seconds) => (seconds / run.end) * W;
  const seek = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    onSeek(((event.clientX - box.left) / box.width) * run.end);
  };
  const now = run.bins[Math.min(run.bins.length - 1, Math.floor(at / BIN_S))] ?? 0;
  return html`<figure class="chart second">
    <figcaption><span>Tokens per second</span><strong>${rate(now)}</strong></figcaption>
    <svg viewBox=${`0 0 ${W} ${H}`} preserveAspectRatio="none" role="img" aria-label=${`Tokens per second, at most ${rate(most)}`} onClick=${seek}>
      <line x1="0" x2=${W} y1=${H - 1} y2=${H - 1} class="axis" />
      ${run.bins.map((value, index) => html`<rect key=${index} x=${index * wide} width=${Math.max(0.5, wide - 0.6)} y=${H - 1 - (value / most) * (H - 8)} height=${(value / most) * (H - 8)} class=${index * BIN_S <= at ? "bar" : "bar later"} />`)}
      ${first !== null && html`<line x1=${x(first)} x2=${x(first)} y1="0" y2=${H} class="mark"><title>first token of loading nodes</title></line>`}
      <line x1=${x(at)} x2=${x(at)} y1="0" y2=${H} class="cursor" />
    </svg>
    <div class="chart-foot muted"><span>0 s</span><span>${run.end.toFixed(0)} s</span></div>
  </figure>`;
}

function Player({ run, name }) {
  const [at, setAt] = useState(0);
  const [playing, setPlaying] = useState(!matchMedia("(prefers-reduced-motion: reduce)").matches);
  const [speed, setSpeed] = useState(1);
  const now = useRef(0);
  now.current = at;
  useEffect(() => {
    if (!playing) return undefined;
    let last = performance.now();
    let frame = requestAnimationFrame(function step(time) {
      const next = Math.min(run.end, now.current + ((time - last) / 1000) * speed);
      last = time;
      setAt(next);
      if (next >= run.end) setPlaying(false);
      else frame = requestAnimationFrame(step);
    });
    return () => cancelAnimationFrame(frame);
  }, [playing, speed, run]);
  const seek = (seconds) => setAt(Math.max(0, Math.min(run.end, seconds)));
  const toggle = () => {
    if (!playing && at >= run.end) setAt(0);
    setPlaying(!playing);
  };
  const found = stateAt(run, at);
  const { params, first } = run;
  const whole = first?.whole_s?.[0];
  return html`<dl class="stats">
      <${Stat} label="Time" value=${`${at.toFixed(1)} s`} note=${`of ${run.end.toFixed(0)} s since the scale request`} />
      <${Stat} label="Nodes ready" value=${`${found.ready} of ${run.nodes.length}`} note=${`from ${params.sources ?? "?"} that hold it, ${params.link_rate ?? "?"} links`} />
      <${Stat} label="Pipelines" value=${found.live.pipelines.length} note=${found.live.way || "none"} />
      <${Stat} label="Image" value=${params.image_bytes ? bytes(params.image_bytes) : "–"} note=${`${run.layers} layers`} />
      ${first?.first_live_s && html`<${Stat} label="First token" value=${`${first.first_live_s.toFixed(1)} s`} note=${whole ? `the first whole node: ${whole.toFixed(1)} s` : ""} />`}
    </dl>
    <div class="player card">
      <button class="primary" onClick=${toggle} aria-label=${playing ? "Pause" : "Play"}><${Icon} name=${playing ? "pause" : "play"} size="16" /></button>
      <input type="range" min="0" max=${run.end} step="0.05" value=${at} aria-label="Time in seconds" onInput=${(event) => seek(Number(event.target.value))} />
      <label class="speed"><span class="hidden">Speed</span><select value=${speed} onChange=${(event) => setSpeed(Number(event.target.value))}>${SPEEDS.map((one) => html`<option value=${one} selected=${one === speed}>${one}×</option>`)}</select></label>
    </div>
    <div class="grid wide-first">
      <${Card} title="Nodes" extra=${html`<span class="muted">${name}</span>`}>
        <${Lanes} lanes=${found.lanes} label="Nodes of the recorded run" />
        <${Legend} blocks=${found.lanes.some((lane) => lane.cells)} pipelines=${run.names.size} />
      <//>
      <div class="stack">
        <${Card}><${Tokens} run=${run} at=${at} onSeek=${seek} /><//>
        <${Card} title="Decision"><p>${found.live.reason || "None yet."}</p><p class="muted">${params.date ?? ""} ${params.machine ?? ""}</p><//>
      </div>
    </div>`;
}

export function ReplayPage() {
  const [loaded, setLoaded] = useState(null);
  const [error, setError] = useState(null);
  const [over, setOver] = useState(false);
  const open = async (file) => {
    if (!file) return;
    setError(null);
    try {
      if (file.size > MAX_BYTES) throw new Error(`${file.name} has more than ${bytes(MAX_BYTES)}.`);
      setLoaded({ run: parse(await file.text()), name: file.name });
    } catch (found) {
      setError(found instanceof SyntaxError ? new Error(`${file.name} is not JSON.`) : found);
    }
  };
  const drop = (event) => {
    event.preventDefault();
    setOver(false);
    open(event.dataTransfer.files[0]);
  };
  const player = useMemo(() => loaded && html`<${Player} key=${loaded.name + loaded.run.end} run=${loaded.run} name=${loaded.name} />`, [loaded]);
  return html`<${Page} title="Recorded run" intro="A load that answers while it spreads, as it was recorded.">
    <${Notice} error=${error} />
    <label class=${`drop ${over ? "over" : ""} ${loaded ? "small-drop" : ""}`} onDragOver=${(event) => {
      event.preventDefault();
      setOver(true);
    }} onDragLeave=${() => setOver(false)} onDrop=${drop}>
      <input type="file" accept=".json,application/json" onChange=${(event) => open(event.target.files[0])} />
      <span>${loaded ? "Open another file" : html`Drop a file of <code>benchmarks.live_picture</code> here, or choose one`}</span>
    </label>
    ${player}
  <//>`;
}
