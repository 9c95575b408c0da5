// Small charts in SVG.
import { ms } from "./format.js";
import { html } from "./lib.js";

const W = 600;

// A line with its area; `points` are numbers, the last one is now, and there is room for `slots` of them.
export function Line({ points, label, slots = points.length, height = 120, format = String, tone = "" }) {
  const most = Math.max(...points, 0) || 1;
  const x = (index) => ((slots - points.length + index) / Math.max(1, slots - 1)) * W;
  const y = (value) => height - 4 - (value / most) * (height - 12);
  const line = points.map((value, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const area = points.length ? `${line}L${W} ${height}L${x(0).toFixed(1)} ${height}Z` : "";
  return html`<figure class=${`chart ${tone}`}>
    <figcaption><span>${label}</span><strong>${format(points.at(-1) ?? 0)}</strong></figcaption>
    <svg viewBox=${`0 0 ${W} ${height}`} preserveAspectRatio="none" role="img" aria-label=${`${label}: now ${format(points.at(-1) ?? 0)}, at most ${format(Math.max(...points, 0))}`}>
      <line x1="0" x2=${W} y1=${height - 1} y2=${height - 1} class="axis" />
      <path d=${area} class="area" />
      <path d=${line} class="line" />
    </svg>
    <div class="chart-foot muted"><span>${slots >= 60 ? `${Math.round(slots / 60)} min ago` : ""}</span><span>peak ${format(Math.max(...points, 0))}</span></div>
  </figure>`;
}

// Bars; `rows` are {label, value}.
export function Bars({ rows, label, format = String, height = 160 }) {
  const most = Math.max(...rows.map((row) => row.value), 0) || 1;
  const width = W / Math.max(1, rows.length);
  const bar = Math.min(width * 0.7, 36);
  return html`<figure class="chart">
    <svg viewBox=${`0 0 ${W} ${height}`} preserveAspectRatio="none" role="img" aria-label=${`${label}: ${rows.map((row) => `${row.label} ${format(row.value)}`).join(", ")}`}>
      <line x1="0" x2=${W} y1=${height - 1} y2=${height - 1} class="axis" />
      ${rows.map((row, index) => {
        const tall = row.value > 0 ? Math.max(2, (row.value / most) * (height - 8)) : 0;
        return html`<rect key=${row.label} x=${index * width + (width - bar) / 2} y=${height - 1 - tall} width=${bar} height=${tall} class="bar"><title>${row.label}: ${format(row.value)}</title></rect>`;
      })}
    </svg>
    <div class="chart-foot muted"><span>${rows[0]?.label}</span><span>${rows.length > 1 ? rows.at(-1).label : ""}</span></div>
  </figure>`;
}

// The phases of a start as parts of one bar.
export function Phases({ phases }) {
  const parts = Object.entries(phases).filter(([, took]) => took > 0);
  const sum = parts.reduce((total, [, took]) => total + took, 0);
  if (!sum) return html`<span class="muted">–</span>`;
  let x = 0;
  return html`<div class="phases">
    <svg viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=${parts.map(([name, took]) => `${name} ${ms(took)}`).join(", ")}>
      ${parts.map(([name, took], index) => {
        const wide = (took / sum) * 100;
        const rect = html`<rect key=${name} x=${x} width=${wide} height="6" class=${`phase-${index % 5}`}><title>${name}: ${ms(took)}</title></rect>`;
        x += wide;
        return rect;
      })}
    </svg>
    <small class="muted">${parts.map(([name, took]) => `${name} ${ms(took)}`.replaceAll(" ", "\u00a0")).join(" · ")}</small>
  </div>`;
}
