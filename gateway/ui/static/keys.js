// Keys and their quotas: all of them for admins, and the own one for everybody.
import { get, request, send } from "./api.js";
import { count, money, time } from "./format.js";
import { html, useState } from "./lib.js";
import { Badge, Card, Copy, Dialog, Field, Meter, Notice, Page, Stat, Table, useLoaded } from "./parts.js";

const ROLES = ["caller", "deployer", "viewer", "billing", "admin"];
const PERIODS = ["day", "month", "total"];
const LIMITS = [
  { name: "requests_per_minute", label: "Requests a minute" },
  { name: "tokens_per_minute", label: "Tokens a minute" },
  { name: "max_concurrent", label: "Concurrent requests" },
];

const stateOf = (key) => {
  if (key.revoked_at !== null) return "revoked";
  return key.expires_at !== null && key.expires_at < Date.now() / 1000 ? "expired" : "valid";
};

const limitsOf = (key, currency) => {
  const found = LIMITS.filter((one) => key[one.name] !== null).map((one) => `${count(key[one.name])} ${one.label.toLowerCase()}`);
  if (key.spend_limit_nanos !== null) found.push(`${money(key.spend_limit_nanos, currency)} ${key.spend_period === "total" ? "in total" : `a ${key.spend_period}`}`);
  return found;
};

function Spent({ of, currency }) {
  if (of.spend_limit_nanos === null) return html`<span class="muted">no limit</span>`;
  const text = `${money(of.spent_nanos ?? 0, currency)} of ${money(of.spend_limit_nanos, currency)}`;
  return html`<div class="spent">${text}<${Meter} value=${of.spent_nanos ?? 0} max=${of.spend_limit_nanos} label=${`Spent ${text}`} /></div>`;
}

function whole(text, label) {
  if (text.trim() === "") return null;
  if (!/^\d+$/.test(text.trim())) throw new Error(`${label}: write a whole number, or nothing for no limit.`);
  return Number(text);
}

function limitsFrom(form) {
  const found = Object.fromEntries(LIMITS.map((one) => [one.name, whole(form[one.name], one.label)]));
  const spend = form.spend.trim();
  if (spend !== "" && !(Number(spend) >= 0)) throw new Error("Spend limit: write an amount, or nothing for no limit.");
  return { ...found, spend_limit_nanos: spend === "" ? null : Math.round(Number(spend) * 1e9), spend_period: form.spend_period };
}

function LimitFields({ of = {}, currency }) {
  return html`<div class="fields">
      ${LIMITS.map((one) => html`<${Field} label=${one.label} key=${one.name}><input name=${one.name} inputmode="numeric" defaultValue=${of[one.name] ?? ""} placeholder="no limit" /><//>`)}
    </div>
    <div class="fields">
      <${Field} label=${`Spend limit (${currency})`}><input name="spend" inputmode="decimal" defaultValue=${of.spend_limit_nanos == null ? "" : of.spend_limit_nanos / 1e9} placeholder="no limit" /><//>
      <${Field} label="in each"><select name="spend_period">${PERIODS.map((one) => html`<option selected=${one === (of.spend_period ?? "month")}>${one}</option>`)}</select><//>
    </div>`;
}

function Own({ me }) {
  const { data } = useLoaded((signal) => get("admin/me", { signal }), []);
  const own = data ?? me;
  return html`<${Card} title="This key" extra=${html`<${Badge} tone="info">${own.role}<//>`}>
    <dl class="stats inner">
      <${Stat} label="Tenant" value=${own.tenant} note=${own.name || "without a name"} />
      ${LIMITS.map((one) => html`<${Stat} key=${one.name} label=${one.label} value=${own[one.name] === null ? "no limit" : count(own[one.name])} />`)}
      <${Stat} label="Spent" value=${html`<${Spent} of=${own} currency=${own.currency} />`} note=${own.spend_limit_nanos === null ? "" : `this ${own.spend_period}`} />
    </dl>
    <p class="muted">
      Key <code>${own.id}</code>${own.expires_at !== null && `, until ${time(own.expires_at)}`}.
      ${own.functions.length ? ` It calls ${own.functions.join(", ")} alone.` : ""} It may: ${own.rights.filter((right) => right !== "key" && right !== "none").join(", ")}.
    </p>
  <//>`;
}

function Secret({ made, onClose }) {
  return html`<${Dialog} title="The new key" onClose=${onClose}>
    <p>Copy it now: nobody can see it again.</p>
    <p class="secret"><code>${made}</code> <${Copy} text=${made} /></p>
  <//>`;
}

export function KeysPage({ me }) {
  const isAdmin = me.rights.includes("admin");
  return html`<${Page} title="Keys and quotas">
    <${Own} me=${me} />
    ${isAdmin && html`<${All} me=${me} />`}
  <//>`;
}

function All({ me }) {
  const { data, error, again } = useLoaded((signal) => get("admin/keys", { signal }), []);
  const [dialog, setDialog] = useState(null);
  const [search, setSearch] = useState("");
  const wanted = search.trim().toLowerCase();
  const rows = (data?.keys ?? [])
    .filter((key) => [key.id, key.tenant, key.name, key.role].some((text) => text.toLowerCase().includes(wanted)))
    .sort((a, b) => (stateOf(a) === "valid" ? 0 : 1) - (stateOf(b) === "valid" ? 0 : 1) || a.tenant.localeCompare(b.tenant) || b.created_at - a.created_at);
  const close = () => setDialog(null);
  const create = async (form) => {
    const limits = limitsFrom(form);
    const given = Object.fromEntries(Object.entries(limits).filter(([, value]) => value !== null));
    const functions = form.functions.split(/[\s,]+/).filter(Boolean);
    const days = whole(form.days, "Valid for");
    const made = await send("POST", "admin/keys", {
      tenant: form.tenant.trim(),
      name: form.name.trim(),
      role: form.role,
      ...(functions.length ? { functions } : {}),
      ...(days ? { expires_in_s: days * 86_400 } : {}),
      ...given,
    });
    again();
    setTimeout(() => setDialog({ kind: "made", made: made.key }));
  };
  return html`<${Card}
    title="All keys"
    extra=${html`<input type="search" placeholder="Search" aria-label="Search keys" value=${search} onInput=${(event) => setSearch(event.target.value)} />
      <button class="primary" onClick=${() => setDialog({ kind: "create" })}>Create a key</button>`}
  >
    <${Notice} error=${error} />
    <${Table}
      caption="Keys"
      pageSize=${25}
      rows=${rows}
      keyOf=${(key) => key.id}
      empty=${data ? "No key matches." : "Loading …"}
      columns=${[
        { label: "Tenant", cell: (key) => html`<strong>${key.tenant}</strong>${key.name && html`<br /><small class="muted">${key.name}</small>`}` },
        { label: "Role", cell: (key) => key.role },
        { label: "Key", cell: (key) => html`<code>${key.id}</code>${key.id === me.id && html` <${Badge} tone="info">this one<//>`}` },
        { label: "State", cell: (key) => html`<${Badge} tone=${stateOf(key) === "valid" ? "good" : "bad"}>${stateOf(key)}<//>` },
        { label: "Limits", wide: true, cell: (key) => limitsOf(key, me.currency).join(", ") || html`<span class="muted">none</span>` },
        { label: "Spent", cell: (key) => html`<${Spent} of=${key} currency=${me.currency} />` },
        {
          label: "",
          cell: (key) =>
            stateOf(key) === "valid" &&
            html`<span class="row-actions">
              <button class="small" onClick=${() => setDialog({ kind: "limits", key })}>Limits</button>
              <button class="small" onClick=${() => setDialog({ kind: "rotate", key })}>Rotate</button>
              <button class="small danger-text" aria-label=${`Revoke ${key.id}`} onClick=${() => setDialog({ kind: "revoke", key })}>Revoke</button>
            </span>`,
        },
      ]}
    />
    ${dialog?.kind === "create" &&
    html`<${Dialog} title="Create a key" submit="Create" onClose=${close} onSubmit=${create}>
      <div class="fields">
        <${Field} label="Tenant"><input name="tenant" required maxlength="128" autocomplete="off" /><//>
        <${Field} label="Name"><input name="name" maxlength="128" autocomplete="off" placeholder="what it is for" /><//>
      </div>
      <div class="fields">
        <${Field} label="Role"><select name="role">${ROLES.map((role) => html`<option>${role}</option>`)}</select><//>
        <${Field} label="Valid for (days)"><input name="days" inputmode="numeric" placeholder="for ever" /><//>
      </div>
      <${Field} label="Only these functions"><input name="functions" autocomplete="off" placeholder="any" /><//>
      <${LimitFields} currency=${me.currency} />
    <//>`}
    ${dialog?.kind === "limits" &&
    html`<${Dialog}
      title=${`Limits of ${dialog.key.id}`}
      onClose=${close}
      onSubmit=${async (form) => {
        await send("PATCH", `admin/keys/${dialog.key.id}`, limitsFrom(form));
        again();
      }}
    >
      <${LimitFields} of=${dialog.key} currency=${me.currency} />
    <//>`}
    ${dialog?.kind === "rotate" &&
    html`<${Dialog}
      title=${`Rotate ${dialog.key.id}?`}
      submit="Rotate"
      onClose=${close}
      onSubmit=${async (form) => {
        const made = await send("POST", `admin/keys/${dialog.key.id}/rotate`, { grace_s: Number(form.hours) * 3600 });
        again();
        setTimeout(() => setDialog({ kind: "made", made: made.key }));
      }}
    >
      <p>A new key with the same rights and limits is made.</p>
      <${Field} label="The former one works for (hours)"><input name="hours" type="number" min="0" max="720" required defaultValue="24" /><//>
    <//>`}
    ${dialog?.kind === "revoke" &&
    html`<${Dialog}
      title=${`Revoke ${dialog.key.id}?`}
      submit="Revoke"
      danger
      onClose=${close}
      onSubmit=${async () => {
        await request("DELETE", `admin/keys/${dialog.key.id}`);
        again();
      }}
    >
      <p>The key of ${dialog.key.tenant}${dialog.key.name ? ` (${dialog.key.name})` : ""} stops working within seconds. That cannot be taken back.</p>
    <//>`}
    ${dialog?.kind === "made" && html`<${Secret} made=${dialog.made} onClose=${close} />`}
  <//>`;
}
