// The picture of a load: for each node what has arrived, which layers it can run, and in which pipeline.
//
// A lane is {node, note, state, cells, held, layers, runnable, stages: [{pipeline, first, last}]}; `held` and
// `runnable` are bitmaps as bytes. It is drawn on a canvas, since it has thousands of parts and changes ten times
// a second; the text beside it is for people who do not see it.
import { bit, ones, percent } from "./format.js";
import { html, useEffect, useLayoutEffect, useRef } from "./lib.js";
import { Badge } from "./parts.js";

const PIPELINES = 6; // colours
const BLOCKS_PX = 14;
const LAYERS_PX = 22;
const GAP_PX = 4;

let palette = null;
addEventListener("themechange", () => {
  palette = null;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  palette = null;
});

// The colours of the theme, which only the browser can resolve.
function colours() {
  if (palette) return palette;
  const probe = document.createElement("i");
  document.body.append(probe);
  const of = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  palette = {
    rail: of("--rail"),
    held: of("--held"),
    layer: of("--layer"),
    edge: of("--surface"),
    text: of("--on-pipeline"),
    pipelines: Array.from({ length: PIPELINES }, (_, index) => of(`--pipeline-${index}`)),
  };
  probe.remove();
  return palette;
}

export const pipelineClass = (index) => `pipeline-${index % PIPELINES}`;

function draw(canvas, lane) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = (lane.cells ? BLOCKS_PX + GAP_PX : 0) + LAYERS_PX;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const on = canvas.getContext("2d");
  const paint = colours();
  on.setTransform(scale, 0, 0, scale, 0, 0);
  on.clearRect(0, 0, width, height);
  let top = 0;
  if (lane.cells) {
    on.fillStyle = paint.rail;
    on.fillRect(0, 0, width, BLOCKS_PX);
    on.fillStyle = paint.held;
    const wide = width / lane.cells;
    const gap = wide > 4 ? 1 : 0;
    for (let index = 0; index < lane.cells; index += 1) {
      if (!bit(lane.held, index)) continue;
      let end = index + 1;
      if (!gap) while (end < lane.cells && bit(lane.held, end)) end += 1;
      on.fillRect(index * wide, 0, (end - index) * wide - gap, BLOCKS_PX);
      index = end - 1;
    }
    top = BLOCKS_PX + GAP_PX;
  }
  const layers = Math.max(1, lane.layers);
  const wide = width / layers;
  const gap = wide > 5 ? 1.5 : wide > 2.5 ? 0.5 : 0;
  if (lane.state !== "source") {
    on.fillStyle = paint.rail;
    on.fillRect(0, top, width, LAYERS_PX);
  }
  on.fillStyle = paint.layer;
  for (let layer = 0; layer < lane.layers; layer += 1) {
    if (bit(lane.runnable, layer)) on.fillRect(layer * wide, top, wide - gap, LAYERS_PX);
  }
  for (const stage of lane.stages) {
    on.fillStyle = paint.pipelines[stage.pipeline % PIPELINES];
    for (let layer = stage.first; layer < stage.last; layer += 1) on.fillRect(layer * wide, top, wide - gap, LAYERS_PX);
    const label = `P${stage.pipeline + 1}`;
    on.font = "600 11px system-ui, sans-serif";
    if ((stage.last - stage.first) * wide > on.measureText(label).width + 8) {
      on.fillStyle = paint.text;
      on.textBaseline = "middle";
      on.fillText(label, stage.first * wide + 5, top + LAYERS_PX / 2 + 0.5);
    }
  }
}

// In words, for the picture's label and beside it.
export function words(lane) {
  const parts = [];
  if (lane.state === "source") return "holds the whole model";
  if (lane.cells) parts.push(`${percent(ones(lane.held) / lane.cells)} arrived`);
  if (lane.layers) parts.push(`${Math.min(lane.layers, ones(lane.runnable))} of ${lane.layers} layers`);
  for (const stage of lane.stages) {
    const range = stage.last - stage.first === 1 ? `layer ${stage.first}` : `layers ${stage.first} to ${stage.last - 1}`;
    parts.push(`runs ${range} of pipeline ${stage.pipeline + 1}`);
  }
  return parts.join(", ");
}

function Lane({ lane, register }) {
  const canvas = useRef();
  useLayoutEffect(() => {
    const paint = () => draw(canvas.current, lane);
    paint();
    return register(paint);
  });
  return html`<li class=${`lane ${lane.state}`}>
    <div class="lane-name"><strong>${lane.node}</strong> <${Badge}>${lane.state}<//>${lane.note && html`<small class="muted">${lane.note}</small>`}</div>
    <canvas ref=${canvas} class=${lane.cells ? "with-blocks" : ""} role="img" aria-label=${`${lane.node}: ${words(lane)}`}></canvas>
    <div class="lane-text">${words(lane)}</div>
  </li>`;
}

export function Lanes({ lanes, label }) {
  const paints = useRef(new Set());
  useEffect(() => {
    const all = () => {
      for (const paint of paints.current) paint();
    };
    addEventListener("resize", all);
    addEventListener("themechange", all);
    return () => {
      removeEventListener("resize", all);
      removeEventListener("themechange", all);
    };
  }, []);
  const register = (paint) => {
    paints.current.add(paint);
    return () => paints.current.delete(paint);
  };
  return html`<ul class=${`lanes ${lanes.length > 24 ? "many" : ""}`} aria-label=${label}>
    ${lanes.map((lane) => html`<${Lane} key=${lane.node} lane=${lane} register=${register} />`)}
  </ul>`;
}

export function Legend({ blocks, pipelines }) {
  return html`<p class="legend muted">
    ${blocks && html`<span><i class="swatch held"></i>blocks that have arrived</span>`}
    <span><i class="swatch layer"></i>layers that the node can run</span>
    ${Array.from({ length: Math.min(pipelines, PIPELINES) }, (_, index) => html`<span><i class=${`swatch ${pipelineClass(index)}`}></i>stage of pipeline ${index + 1}</span>`)}
  </p>`;
}

// A bitmap of `count` ones.
export function all(count) {
  const held = new Uint8Array((count + 7) >> 3);
  for (let index = 0; index < count; index += 1) held[index >> 3] |= 1 << (index & 7);
  return held;
}

// A number of a bitmap (as BigInt) as bytes.
export function fromNumber(value) {
  const found = [];
  for (let rest = BigInt(value); rest; rest >>= 8n) found.push(Number(rest & 255n));
  return Uint8Array.from(found);
}
