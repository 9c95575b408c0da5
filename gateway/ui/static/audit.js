// The audit log of changes.
import { get, query } from "./api.js";
import { time } from "./format.js";
import { html, useEffect, useState } from "./lib.js";
import { Badge, Card, Empty, Notice, Page, Table } from "./parts.js";

const KINDS = ["", "function.", "key.", "price.", "usage.", "secret.", "blob."];
const PAGE = 100;

// Digests of blobs are long, and differ in their first characters.
const short = (target) => (/^[0-9a-f]{64}$/.test(target) ? `${target.slice(0, 12)}…` : target);

function Fields({ fields }) {
  const names = Object.keys(fields);
  if (!names.length) return "–";
  const text = Object.entries(fields).map(([name, size]) => `${name} (${size} B)`).join(", ");
  if (names.length <= 3) return html`<small>${text}</small>`;
  return html`<details><summary>${names.length} fields</summary><small>${text}</small></details>`;
}

function outcome(entry) {
  if (entry.status === null) return html`<${Badge} tone="warn">unknown<//>`;
  return html`<${Badge} tone=${entry.status < 400 ? "good" : "bad"}>${entry.status}<//>${entry.code && html` <small class="muted">${entry.code}</small>`}`;
}

export function AuditPage() {
  const [log, setLog] = useState("");
  const [operation, setOperation] = useState("");
  const [key, setKey] = useState("");
  const [entries, setEntries] = useState(null);
  const [next, setNext] = useState("");
  const [error, setError] = useState(null);

  const load = async (cursor, signal) => {
    setError(null);
    try {
      const found = await get(`admin/audit${query({ limit: PAGE, log, operation, key, cursor })}`, { signal });
      if (signal?.aborted) return;
      setEntries((before) => (cursor ? [...(before ?? []), ...found.entries] : found.entries));
      setNext(found.next);
    } catch (found) {
      if (found.name !== "AbortError") setError(found);
    }
  };
  useEffect(() => {
    const stop = new AbortController();
    load("", stop.signal);
    return () => stop.abort();
  }, [log, operation, key]);

  return html`<${Page} title="Audit log" intro="Who changed what, from where, and how it ended. Values are not kept, only their sizes.">
    <form class="filters" onSubmit=${(event) => {
      event.preventDefault();
      setKey(new FormData(event.currentTarget).get("key").trim());
    }}>
      <div class="choices" role="group" aria-label="Log">
        <button type="button" aria-pressed=${log === ""} onClick=${() => setLog("")}>Changes</button>
        <button type="button" aria-pressed=${log === "refused"} onClick=${() => setLog("refused")}>Refused</button>
      </div>
      <select aria-label="Operations" value=${operation} onChange=${(event) => setOperation(event.target.value)}>
        ${KINDS.map((kind) => html`<option value=${kind}>${kind ? `${kind}*` : "All operations"}</option>`)}
      </select>
      <input name="key" type="search" placeholder="Key id" aria-label="Only of this key" autocomplete="off" />
      <button>Filter</button>
    </form>
    <${Notice} error=${error} />
    <${Card}>
      ${entries === null
        ? html`<${Empty}>Loading …<//>`
        : html`<${Table}
            caption="Audit log"
            pageSize=${PAGE}
            rows=${entries}
            keyOf=${(entry) => entry.id}
            empty="No such change."
            columns=${[
              { label: "Time", cell: (entry) => html`<span class="nowrap">${time(entry.at)}</span>` },
              { label: "Operation", cell: (entry) => html`<strong class="nowrap">${entry.operation}</strong>` },
              { label: "Target", wide: true, cell: (entry) => html`<span title=${entry.target}>${short(entry.target) || "–"}</span>${entry.made && html` <span class="muted">made ${entry.made}</span>`}` },
              { label: "By", cell: (entry) => (entry.key_id ? html`${entry.tenant} <small class="muted">${entry.role}</small><br /><code>${entry.key_id}</code>` : html`<span class="muted">${entry.gateway}</span>`) },
              { label: "From", cell: (entry) => html`<span class="nowrap">${entry.address || "–"}</span>` },
              { label: "Fields", wide: true, cell: (entry) => html`<${Fields} fields=${entry.fields} />` },
              { label: "Outcome", cell: outcome },
            ]}
          />`}
      ${next && html`<p class="more"><button onClick=${() => load(next)}>Show more</button></p>`}
    <//>
  <//>`;
}
