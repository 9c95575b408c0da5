// All functions that the key may see.
import { get } from "./api.js";
import { bytes, ms, rate } from "./format.js";
import { html, useState } from "./lib.js";
import { functionRows, InstanceCounts } from "./overview.js";
import { Badge, Card, Notice, Page, Table, useLoaded } from "./parts.js";
import { useCluster } from "./store.js";

function Owned() {
  useCluster(1000);
  const [search, setSearch] = useState("");
  const wanted = search.trim().toLowerCase();
  const rows = functionRows()
    .filter((row) => row.name.toLowerCase().includes(wanted) || (row.owner ?? "").toLowerCase().includes(wanted))
    .sort((a, b) => a.name.localeCompare(b.name));
  return html`<${Card}
    title=${`${rows.length} ${rows.length === 1 ? "function" : "functions"}`}
    extra=${html`<input type="search" placeholder="Search" aria-label="Search functions" value=${search} onInput=${(event) => setSearch(event.target.value)} />`}
  >
    <${Table}
      caption="Functions"
      pageSize=${25}
      rows=${rows}
      keyOf=${(row) => row.name}
      empty=${wanted ? "No function matches." : "No function is deployed yet: hypercast deploy PATH"}
      columns=${[
        { label: "Name", cell: (row) => html`<a href=${`#/functions/${encodeURIComponent(row.name)}`}>${row.name}</a>` },
        { label: "Task", cell: (row) => row.task },
        { label: "Version", num: true, cell: (row) => row.version },
        { label: "Instances", cell: (row) => html`<${InstanceCounts} row=${row} />` },
        { label: "Requests/s", num: true, cell: (row) => rate(row.requests_s) },
        { label: "Tokens/s", num: true, cell: (row) => rate(row.tokens_s) },
        { label: "TTFT", num: true, cell: (row) => ms(row.ttft_ms) },
        { label: "Image", num: true, cell: (row) => (row.image_bytes ? bytes(row.image_bytes) : "–") },
        { label: "Owner", cell: (row) => html`${row.owner ?? "operator"}${row.private && html` <${Badge}>private<//>`}` },
      ]}
    />
  <//>`;
}

// Functions of others, which a tenant may call.
function Callable({ me }) {
  const { data, error } = useLoaded((signal) => get("v1/models", { signal }), []);
  const cluster = useCluster(2000);
  const others = (data?.data ?? []).filter((model) => !cluster.functions.has(model.id));
  if (!error && !others.length && me.rights.includes("read-functions")) return null;
  return html`<${Card} title=${me.rights.includes("read-functions") ? "Shared with you" : "Functions that you can call"}>
    <${Notice} error=${error} />
    <ul class="plain columns">
      ${others.map((model) => html`<li key=${model.id}><a href=${`#/functions/${encodeURIComponent(model.id)}/try`}>${model.id}</a></li>`)}
    </ul>
  <//>`;
}

export function FunctionsPage({ me }) {
  return html`<${Page} title="Functions">
    ${me.rights.includes("read-functions") && html`<${Owned} />`}
    ${me.rights.includes("call") && html`<${Callable} me=${me} />`}
    ${!me.rights.includes("read-functions") && !me.rights.includes("call") && html`<p class="empty">A key of the role ${me.role} sees no functions.</p>`}
  <//>`;
}
