// Predictions and batches of the key's tenant: calls that run in the background.
import { download, get, send } from "./api.js";
import { ago, counted, ms, time } from "./format.js";
import { html, useEffect, useState } from "./lib.js";
import { Badge, Card, Code, Dialog, Empty, Notice, Page, Table } from "./parts.js";

const MOST = 100; // of each kind
const WAIT_S = 5; // for the end of a job, or between two looks
const MAX_TEXT = 20_000; // characters of an input or output that are shown
const ENDS = { prediction: ["succeeded", "failed", "canceled"], batch: ["completed", "failed", "expired", "cancelled"] };
const TONES = { succeeded: "good", completed: "good", failed: "bad", expired: "bad", processing: "info", in_progress: "info", finalizing: "info" };
const KINDS = [
  { id: "", label: "All" },
  { id: "prediction", label: "Predictions" },
  { id: "batch", label: "Batches" },
];

const pathOf = (row) => (row.kind === "batch" ? `v1/batches/${row.id}` : `predictions/${encodeURIComponent(row.id)}`);
const seconds = (text) => (text === null ? null : Date.parse(text) / 1000);
const hasEnded = (row) => ENDS[row.kind].includes(row.status);

function predictionRow(one) {
  return {
    ...one,
    kind: "prediction",
    calls: one.model,
    created: seconds(one.created_at),
    started: seconds(one.started_at),
    ended: seconds(one.completed_at),
    reason: one.error?.message ?? "",
  };
}

function batchRow(one) {
  const [fault] = one.errors?.data ?? [];
  return {
    ...one,
    kind: "batch",
    calls: one.endpoint,
    created: one.created_at,
    started: one.in_progress_at,
    ended: ENDS.batch.map((status) => one[`${status}_at`]).find((at) => at) ?? null,
    reason: fault ? `${fault.line === null ? "" : `line ${fault.line}: `}${fault.message}` : "",
  };
}

async function load(signal) {
  const [predictions, batches] = await Promise.all([
    get(`predictions?limit=${MOST}`, { signal }),
    get(`v1/batches?limit=${MOST}`, { signal }),
  ]);
  const rows = [...predictions.data.map(predictionRow), ...batches.data.map(batchRow)];
  return { rows: rows.sort((a, b) => b.created - a.created), more: predictions.has_more || batches.has_more };
}

// Wait for the end of a job, or some seconds.
async function news(rows, signal) {
  const open = rows.find((row) => !hasEnded(row));
  if (open) {
    await get(pathOf(open), { signal, headers: { prefer: `wait=${WAIT_S}` } });
    if (rows.length <= MOST) await pause(250, signal); // those of one batch end in a row
  } else {
    await pause(WAIT_S * 1000, signal);
  }
}

function pause(forMs, signal) {
  return new Promise((done) => {
    const timer = setTimeout(done, forMs);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      done();
    });
  });
}

// The jobs as they are now; {found, error, again}.
function useJobs() {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [round, setRound] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    (async () => {
      while (!stop.signal.aborted) {
        try {
          const loaded = await load(stop.signal);
          if (stop.signal.aborted) return;
          setFound(loaded);
          setError(null);
          await news(loaded.rows, stop.signal);
        } catch (failed) {
          if (stop.signal.aborted) return;
          setError(failed);
          await pause(WAIT_S * 1000, stop.signal);
        }
      }
    })();
    return () => stop.abort();
  }, [round]);
  return { found, error, again: () => setRound((number) => number + 1) };
}

function Progress({ row }) {
  if (row.kind !== "batch") return null;
  const { total, completed, failed } = row.request_counts;
  return html`<br /><small class="muted">${completed + failed} of ${counted(total, "call")}${failed ? html`, <span class="bad">${failed} failed</span>` : ""}</small>`;
}

function took(row) {
  if (row.ended === null || row.started === null) return "–";
  return ms((row.ended - row.started) * 1000);
}

const text = (value) => {
  const whole = JSON.stringify(value, null, 2) ?? "";
  return whole.length > MAX_TEXT ? `${whole.slice(0, MAX_TEXT)}\n… (${counted(whole.length, "character")})` : whole;
};

function Details({ row, onClose }) {
  const [shown, setShown] = useState(row);
  const [error, setError] = useState(null);
  useEffect(() => {
    const stop = new AbortController();
    get(pathOf(row), { signal: stop.signal }).then(setShown, (failed) => stop.signal.aborted || setError(failed));
    return () => stop.abort();
  }, [row.id]);
  const file = (id, name) => async () => {
    setError(null);
    try {
      await download(`v1/files/${id}/content`, `${row.id}-${name}.jsonl`);
    } catch (failed) {
      setError(failed);
    }
  };
  return html`<${Dialog} title=${row.id} onClose=${onClose}>
    <p>${row.calls}${" "}<${Badge} tone=${TONES[shown.status] ?? ""}>${shown.status.replace("_", " ")}<//></p>
    <dl class="facts">
      <div><dt>Created</dt><dd>${time(row.created)}</dd></div>
      ${row.ended !== null && html`<div><dt>Ended</dt><dd>${time(row.ended)}</dd></div>`}
      ${shown.webhook && html`<div class="whole"><dt>Webhook (${shown.webhook_status})</dt><dd class="anywhere">${shown.webhook}</dd></div>`}
    </dl>
    ${row.reason && html`<${Notice} error=${row.reason} />`}
    <${Notice} error=${error} />
    ${row.kind === "batch"
      ? html`<div class="actions">
          ${shown.output_file_id && html`<button type="button" onClick=${file(shown.output_file_id, "results")}>Download results</button>`}
          ${shown.error_file_id && html`<button type="button" onClick=${file(shown.error_file_id, "errors")}>Download errors</button>`}
        </div>`
      : html`${shown.input !== undefined && html`<h3>Input</h3><${Code} text=${text(shown.input)} label="Input" />`}
          ${shown.output !== undefined && shown.output !== null && html`<h3>Output</h3><${Code} text=${text(shown.output)} label="Output" />`}`}
  <//>`;
}

export function JobsPage() {
  const { found, error, again } = useJobs();
  const [kind, setKind] = useState("");
  const [open, setOpen] = useState(null);
  const [cancelling, setCancelling] = useState(null);
  const rows = (found?.rows ?? []).filter((row) => !kind || row.kind === kind);
  return html`<${Page} title="Jobs" intro="Predictions and batches: calls that run in the background, of your tenant.">
    <${Notice} error=${error} />
    <div class="filters">
      <div class="choices" role="group" aria-label="Kind">
        ${KINDS.map((one) => html`<button type="button" aria-pressed=${one.id === kind} onClick=${() => setKind(one.id)}>${one.label}</button>`)}
      </div>
    </div>
    <${Card}>
      ${found === null
        ? html`<${Empty}>${error ? "Nothing is known yet." : "Loading …"}<//>`
        : html`<${Table}
            caption="Jobs"
            rows=${rows}
            keyOf=${(row) => row.id}
            empty="None: send one with POST /predictions, or hypercast predict."
            columns=${[
              { label: "Job", wide: true, cell: (row) => html`<button class="link" onClick=${() => setOpen(row)}>${row.id}</button><br /><small class="muted">${row.kind}</small>` },
              { label: "Calls", wide: true, cell: (row) => html`<strong>${row.calls}</strong>` },
              { label: "State", cell: (row) => html`<${Badge} tone=${TONES[row.status] ?? ""}>${row.status.replace("_", " ")}<//><${Progress} row=${row} />` },
              { label: "Created", num: true, cell: (row) => html`<span title=${time(row.created)}>${ago(row.created)} ago</span>` },
              { label: "Ran for", num: true, cell: took },
              { label: "Webhook", cell: (row) => row.webhook_status ?? "–" },
              { label: "", num: true, cell: (row) => !hasEnded(row) && row.status !== "cancelling" && html`<button class="small" aria-label=${`Cancel ${row.id}`} onClick=${() => setCancelling(row)}>Cancel</button>` },
            ]}
          />`}
      ${found?.more && html`<p class="more muted">The latest ${MOST} of each kind. All: hypercast jobs list, or GET /predictions and /v1/batches.</p>`}
    <//>
    ${open && html`<${Details} row=${open} onClose=${() => setOpen(null)} />`}
    ${cancelling &&
    html`<${Dialog}
      title=${`Cancel ${cancelling.id}?`}
      submit="Cancel the job"
      danger=${true}
      onClose=${() => setCancelling(null)}
      onSubmit=${async () => {
        await send("POST", `${pathOf(cancelling)}/cancel`);
        again();
      }}
    >
      <p>${cancelling.kind === "batch" ? "Its calls that have not ended are not run. The results of the others stay." : "It is not run, or stopped. What it has used so far is billed."}</p>
    <//>`}
  <//>`;
}
