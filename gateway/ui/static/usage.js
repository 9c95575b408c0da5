// Usage and cost, from the ledger.
import { download, get, query } from "./api.js";
import { Bars } from "./charts.js";
import { count, money, ms } from "./format.js";
import { html, useState } from "./lib.js";
import { Card, Dialog, Empty, Field, Notice, Page, Stat, Table, useLoaded } from "./parts.js";

const DAY = 86_400;
const SPANS = [
  { id: "today", label: "Today", days: 1 },
  { id: "7", label: "7 days", days: 7 },
  { id: "30", label: "30 days", days: 30 },
  { id: "90", label: "90 days", days: 90 },
];
const FORMS = [
  { id: "sums", label: "Sums as on this page (CSV)" },
  { id: "focus", label: "FOCUS 1.2 (CSV)", ending: "csv" },
  { id: "openmeter", label: "OpenMeter, CloudEvents (JSON lines)", ending: "jsonl" },
  { id: "lago", label: "Lago events (JSON lines)", ending: "jsonl" },
];
const GROUPS = [
  { id: "function", label: "Function" },
  { id: "tenant", label: "Tenant" },
  { id: "key", label: "Key" },
  { id: "day", label: "Day" },
  { id: "version", label: "Version" },
  { id: "status", label: "Status" },
];

const today = () => Math.floor(Date.now() / 1000 / DAY) * DAY;
const dayOf = (at) => new Date(at * 1000).toISOString().slice(0, 10);
const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);

function Days({ since, until, filters, currency }) {
  const { data, error, busy } = useLoaded((signal) => get(`admin/usage/report${query({ by: "day", since, ...filters })}`, { signal }), [since, filters.function, filters.tenant]);
  if (error) return html`<${Notice} error=${error} />`;
  if (!data) return html`<${Empty}>${busy ? "Loading …" : "Nothing yet."}<//>`;
  const byDay = new Map(data.rows.map((row) => [row.day, row]));
  const rows = [];
  for (let at = since; at < until; at += DAY) rows.push({ label: dayOf(at), value: byDay.get(dayOf(at))?.cost_nanos ?? 0 });
  return html`<${Bars} label="Cost by day" rows=${rows} format=${(value) => money(value, currency)} />`;
}

// Days are UTC, both included.
function Export({ first, sums, filters, onClose }) {
  const [form, setForm] = useState("focus");
  const submit = async (fields) => {
    const since = Date.parse(fields.first) / 1000;
    const until = Date.parse(fields.last) / 1000 + DAY;
    if (!(since < until)) throw new Error("The last day is before the first one.");
    const { ending } = FORMS.find((one) => one.id === form);
    const name = `hypercast-${form === "sums" ? "usage" : form}-${fields.first}-${fields.last}.${ending ?? "csv"}`;
    const path = form === "sums" ? "admin/usage/report" : "admin/usage/export";
    const more = form === "sums" ? { by: sums, format: "csv" } : { format: form };
    await download(`${path}${query({ ...more, since, until, ...filters })}`, name);
  };
  const of = [filters.function, filters.tenant].filter(Boolean).join(", ");
  return html`<${Dialog} title="Export" submit="Download" onClose=${onClose} onSubmit=${submit}>
    <p>From the ledger, to the nano. What is exported twice has the same ids.${of && ` Only of ${of}.`}</p>
    <${Field} label="Form">
      <select name="form" onChange=${(event) => setForm(event.target.value)}>
        ${FORMS.map((one) => html`<option value=${one.id} selected=${one.id === form}>${one.label}</option>`)}
      </select>
    <//>
    <div class="fields">
      <${Field} label="First day (UTC)"><input name="first" type="date" required defaultValue=${dayOf(first)} /><//>
      <${Field} label="Last day (UTC)"><input name="last" type="date" required defaultValue=${dayOf(today())} /><//>
    </div>
  <//>`;
}

export function UsagePage({ me }) {
  const seesAll = me.rights.includes("all-tenants");
  const [span, setSpan] = useState("7");
  const [by, setBy] = useState(["function"]);
  const [filters, setFilters] = useState({ function: "", tenant: "" });
  const { days } = SPANS.find((one) => one.id === span);
  const since = today() - (days - 1) * DAY;
  const fields = { by: by.join(","), since, ...filters };
  const { data, error, busy } = useLoaded((signal) => get(`admin/usage/report${query(fields)}`, { signal }), [fields.by, since, filters.function, filters.tenant]);
  const [exporting, setExporting] = useState(false);
  const rows = [...(data?.rows ?? [])].sort((a, b) => (by.includes("day") ? a.day.localeCompare(b.day) : 0) || b.cost_nanos - a.cost_nanos);
  const currency = data?.currency ?? me.currency;
  const groups = GROUPS.filter((one) => seesAll || one.id !== "tenant");
  const toggle = (id) => setBy((before) => (before.includes(id) ? (before.length > 1 ? before.filter((one) => one !== id) : before) : [...before, id]));
  const filter = (event) => {
    event.preventDefault();
    const form = Object.fromEntries(new FormData(event.currentTarget));
    setFilters({ function: form.function.trim(), tenant: (form.tenant ?? "").trim() });
  };
  return html`<${Page} title="Usage and cost" intro="From the ledger; days are UTC." actions=${html`<button onClick=${() => setExporting(true)}>Export</button>`}>
    <${Notice} error=${error} />
    ${exporting && html`<${Export} first=${since} sums=${fields.by} filters=${filters} onClose=${() => setExporting(false)} />`}
    <form class="filters" onSubmit=${filter}>
      <div class="choices" role="group" aria-label="Period">
        ${SPANS.map((one) => html`<button type="button" aria-pressed=${one.id === span} onClick=${() => setSpan(one.id)}>${one.label}</button>`)}
      </div>
      <input name="function" type="search" placeholder="Function" aria-label="Only of this function" autocomplete="off" />
      ${seesAll && html`<input name="tenant" type="search" placeholder="Tenant" aria-label="Only of this tenant" autocomplete="off" />`}
      <button>Filter</button>
    </form>
    <dl class="stats">
      <${Stat} label="Cost" value=${money(sum(rows, "cost_nanos"), currency)} />
      <${Stat} label="Requests" value=${count(sum(rows, "requests"))} />
      <${Stat} label="Prompt tokens" value=${count(sum(rows, "prompt_tokens"))} />
      <${Stat} label="Output tokens" value=${count(sum(rows, "completion_tokens"))} />
      <${Stat} label="Billed GPU time" value=${ms(sum(rows, "billed_gpu_ms"))} />
    </dl>
    <${Card} title="Cost by day"><${Days} since=${since} until=${today() + 1} filters=${filters} currency=${currency} /><//>
    <${Card}
      title="Sums"
      extra=${html`<div class="choices" role="group" aria-label="Group by">
        ${groups.map((one) => html`<button type="button" aria-pressed=${by.includes(one.id)} onClick=${() => toggle(one.id)}>${one.label}</button>`)}
      </div>`}
    >
      <${Table}
        caption="Usage"
        pageSize=${40}
        rows=${rows}
        keyOf=${(row) => by.map((name) => row[name]).join(" ")}
        empty=${busy ? "Loading …" : "No requests in this period."}
        columns=${[
          ...groups.filter((one) => by.includes(one.id)).map((one) => ({ label: one.label, cell: (row) => html`<strong>${row[one.id]}</strong>` })),
          { label: "Requests", num: true, cell: (row) => count(row.requests) },
          { label: "Prompt tokens", num: true, cell: (row) => count(row.prompt_tokens) },
          { label: "Output tokens", num: true, cell: (row) => count(row.completion_tokens) },
          { label: "GPU ms", num: true, cell: (row) => count(row.billed_gpu_ms) },
          { label: "Cost", num: true, cell: (row) => money(row.cost_nanos, currency) },
        ]}
      />
    <//>
  <//>`;
}
