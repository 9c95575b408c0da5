// One function: instances, versions, logs, settings, and a place to try it.
import { get, lines, query, request, send } from "./api.js";
import { Phases } from "./charts.js";
import { ago, bytes, duration, ms, percent, rate, seconds, shortDuration, time } from "./format.js";
import { html, useEffect, useRef, useState } from "./lib.js";
import { Badge, Card, Dialog, Empty, Field, Icon, Meter, Notice, Page, Stat, Table, Tabs, useLoaded } from "./parts.js";
import { instancesOf, state, trafficOf, useCluster } from "./store.js";
import { TryIt } from "./try.js";

const LIFE = ["starting", "loading", "ready", "draining"];
const MAX_LINES = 2000;

function Life({ at, progress }) {
  const index = LIFE.indexOf(at);
  if (index < 0) return html`<${Badge}>${at}<//>`;
  return html`<ol class="life" aria-label=${`${at}, of ${LIFE.join(", ")}`}>
    ${LIFE.map((name, step) => html`<li class=${step < index ? "done" : step === index ? `now ${name}` : ""} key=${name}>${name}${step === index && name === "loading" ? ` ${percent(progress)}` : ""}</li>`)}
  </ol>`;
}

function Instances({ name }) {
  useCluster(250);
  const rows = instancesOf(name).sort((a, b) => a.node.localeCompare(b.node, "en", { numeric: true }));
  const live = [...state.live.values()].find((one) => one.function === name);
  return html`<${Card} title="Instances">
      <${Table}
        caption=${`Instances of ${name}`}
        rows=${rows}
        keyOf=${(row) => row.id}
        empty="None: the next request starts one."
        columns=${[
          { label: "Node", cell: (row) => html`<strong>${row.nodes.length ? row.nodes.join(" + ") : row.node}</strong><br /><small class="muted">${row.id}</small>` },
          { label: "Life cycle", cell: (row) => html`<${Life} at=${row.state} progress=${row.progress} />${row.error && html`<p class="bad">${row.error}</p>`}` },
          { label: "Start", cell: (row) => html`${row.start_kind}${row.source && html`<span class="muted"> from ${row.source}</span>`}` },
          { label: "Phases of the start", wide: true, cell: (row) => html`<${Phases} phases=${row.phases_ms} />` },
          { label: "Since", num: true, cell: (row) => ago(row.since) },
        ]}
      />
    <//>
    ${live &&
    html`<${Card} title="Serving while it loads" extra=${html`<${Badge} tone=${live.way === "off" ? "" : "info"}>${live.way}<//>`}>
      <p>${live.reason}</p>
      ${live.pipelines.length > 0 &&
      html`<ul class="plain">
        ${live.pipelines.map((one) => html`<li key=${one.name}>${one.stages.map((stage) => `${stage.node} [${stage.first}, ${stage.last})`).join(" → ")}</li>`)}
      </ul>`}
    <//>`}`;
}

function Summary({ name, shown }) {
  useCluster(1000);
  const traffic = trafficOf(name);
  const known = state.functions.get(name);
  const ready = instancesOf(name).filter((one) => one.state === "ready" && one.leads).length;
  return html`<dl class="stats">
    <${Stat} label="Instances ready" value=${known ? ready : shown.instances.length} note=${`at least ${shown.scaling.min_instances}${shown.scaling.max_instances === null ? "" : `, at most ${shown.scaling.max_instances}`}`} />
    <${Stat} label="Requests per second" value=${rate(traffic.requests_s)} note=${`${traffic.in_flight} in flight${traffic.held ? `, ${traffic.held} held` : ""}`} />
    <${Stat} label="Tokens per second" value=${rate(traffic.tokens_s)} />
    <${Stat} label="Time to first token" value=${ms(traffic.ttft_ms)} note="mean of 10 s" />
    <${Stat} label="Image" value=${shown.current.image_bytes ? bytes(shown.current.image_bytes) : "–"} note=${shown.current.architecture} />
  </dl>`;
}

const STATES = { starting: "info", running: "info", promoted: "good", rolled_back: "bad", aborted: "warn" };

// The last rollout; while it is in progress with what its versions serve, as of some two seconds ago.
function Rollout({ shown, mayManage, onChanged }) {
  const path = `admin/functions/${encodeURIComponent(shown.name)}/rollout`;
  const { frames } = useCluster(2000);
  const { plan, stable, state: before, reason, since } = shown.rollout;
  const isOpen = ["starting", "running"].includes(before);
  const { data, error, again } = useLoaded((signal) => (mayManage ? get(path, { signal }) : Promise.resolve(null)), [shown.rollout.id, before, isOpen && frames]);
  const [dialog, setDialog] = useState(null);
  const now = data ?? { candidate: plan.candidate, stable, percent: plan.percent, shadow_percent: plan.shadow_percent, state: before, reason, since, ready: null, traffic: [] };
  const active = ["starting", "running"].includes(now.state);
  useEffect(() => {
    if (data && data.state !== before) onChanged();
  }, [data?.state]);
  const end = (action) => async () => {
    await send("POST", `${path}/${action}`);
    onChanged();
    again();
  };
  const actions = mayManage && active && html`
    <button class="small" onClick=${() => setDialog("share")}>Change share</button>
    <button class="small" onClick=${() => setDialog("promote")}>Promote</button>
    <button class="small danger-text" onClick=${() => setDialog("abort")}>Roll back</button>`;
  return html`<${Card} title="Rollout" extra=${html`<${Badge} tone=${STATES[now.state]}>${now.state.replace("_", " ")}<//>${actions}`}>
    <${Notice} error=${error} />
    <p>Version ${now.candidate} beside ${now.stable}${active ? html`: ${now.percent} % of the requests${now.shadow_percent ? `, copies of ${now.shadow_percent} % of the others` : ""}` : ""} <span class="muted">since ${ago(now.since)}</span>${now.ready !== null && active ? html` <span class="muted">· ${now.ready} ready</span>` : ""}</p>
    ${active && html`<${Meter} value=${now.percent} max=${100} label=${`${now.percent} % of the requests go to version ${now.candidate}`} />`}
    ${now.reason && html`<p>${now.reason}</p>`}
    ${now.traffic.length > 0 &&
    html`<${Table}
      caption=${`Versions in the rollout of ${shown.name}`}
      rows=${now.traffic}
      keyOf=${(row) => row.version}
      columns=${[
        { label: "Version", cell: (row) => html`<strong>${row.version}</strong> <span class="muted">${row.version === now.candidate ? "candidate" : "stable"}</span>` },
        { label: "Requests", num: true, cell: (row) => row.requests },
        { label: "Ended", num: true, cell: (row) => row.ended },
        { label: "Errors", num: true, cell: (row) => (row.ended ? `${row.errors} (${((100 * row.errors) / row.ended).toFixed(1)} %)` : "–") },
        { label: "Time to first token", num: true, cell: (row) => ms(row.ttft_ms) },
      ]}
    />
    <p class="muted">Of the last ${duration(now.limits.window_s)}. Rolled back by itself at ${100 * now.limits.max_error_rate}\u00a0% more errors, or ${now.limits.max_ttft_ratio} times the time to the first token.</p>`}
    ${dialog === "share" && html`<${Share} name=${shown.name} to=${now.candidate} percent=${now.percent} onClose=${() => setDialog(null)} onChanged=${() => { onChanged(); again(); }} />`}
    ${dialog === "promote" &&
    html`<${Dialog} title=${`Make version ${now.candidate} current?`} submit="Promote" onClose=${() => setDialog(null)} onSubmit=${end("promote")}>
      <p>All requests go to version ${now.candidate}; those in flight end on the version that they have.</p>
    <//>`}
    ${dialog === "abort" &&
    html`<${Dialog} title="Roll back?" submit="Roll back" danger=${true} onClose=${() => setDialog(null)} onSubmit=${end("abort")}>
      <p>All requests go to version ${now.stable} again; those in flight end on the version that they have.</p>
    <//>`}
  <//>`;
}

// The share of a version in a rollout, which begins with it.
function Share({ name, to, percent, onClose, onChanged }) {
  return html`<${Dialog}
    title=${`Roll out version ${to}`}
    submit="Set share"
    onClose=${onClose}
    onSubmit=${async (form) => {
      await send("POST", `admin/functions/${encodeURIComponent(name)}/rollout`, { to, percent: Number(form.percent) });
      onChanged();
    }}
  >
    <p>The share goes to it once it has a ready instance. It is rolled back by itself if more of its requests fail, or if its first tokens take longer.</p>
    <${Field} label="Percent of the requests"><input name="percent" type="number" min="0" max="100" step="any" required defaultValue=${percent} /><//>
  <//>`;
}

function Versions({ shown, mayManage, onChanged }) {
  const [back, setBack] = useState(null);
  const [to, setTo] = useState(null);
  const rows = [...(shown.history ?? [shown.current])].sort((a, b) => b.version - a.version);
  const rollout = ["starting", "running"].includes(shown.rollout?.state) ? shown.rollout : null;
  return html`${shown.rollout && html`<${Rollout} shown=${shown} mayManage=${mayManage} onChanged=${onChanged} />`}
  <${Card} title="Versions">
    <${Table}
      caption="Versions"
      rows=${rows}
      keyOf=${(row) => row.version}
      columns=${[
        { label: "Version", cell: (row) => html`<strong>${row.version}</strong> ${row.version === shown.current.version && html`<${Badge} tone="good">current<//>`} ${row.version === rollout?.plan.candidate && html`<${Badge}>${rollout.plan.percent} % of requests<//>`}` },
        { label: "Deployed", cell: (row) => (row.created_at ? time(row.created_at) : "–") },
        { label: "By key", cell: (row) => row.deployed_by || "–" },
        { label: "Model", cell: (row) => html`${row.architecture || row.task}<span class="muted">${row.dtype ? ` ${row.dtype}` : ""}</span>` },
        { label: "Engine", cell: (row) => row.engine },
        { label: "Image", wide: true, cell: (row) => (row.image ? html`<code title=${row.image}>${row.image.slice(0, 12)}</code> ${bytes(row.image_bytes)}` : "–") },
        ...(mayManage ? [{ label: "", num: true, cell: (row) => row.version !== shown.current.version && html`<span class="row-actions">${!rollout && html`<button class="small" onClick=${() => setTo(row.version)}>Roll out</button>`}<button class="small" onClick=${() => setBack(row.version)}>Make current</button></span>` }] : []),
      ]}
    />
    ${back !== null &&
    html`<${Dialog}
      title=${`Make version ${back} current?`}
      submit="Make current"
      onClose=${() => setBack(null)}
      onSubmit=${async () => {
        await send("POST", `admin/functions/${encodeURIComponent(shown.name)}/rollback`, { version: back });
        onChanged();
      }}
    >
      <p>New requests go to version ${back}; those in flight end on the version that they have.</p>
    <//>`}
    ${to !== null && html`<${Share} name=${shown.name} to=${to} percent=${10} onClose=${() => setTo(null)} onChanged=${onChanged} />`}
  <//>`;
}

function Logs({ name }) {
  const [follow, setFollow] = useState(true);
  const [shown, setShown] = useState([]);
  const [error, setError] = useState(null);
  const box = useRef();
  useEffect(() => {
    const stop = new AbortController();
    const kept = [];
    let drawing = null;
    const draw = () => {
      drawing = null;
      setShown([...kept]);
    };
    (async () => {
      setError(null);
      try {
        const response = await request("GET", `admin/functions/${encodeURIComponent(name)}/logs${query({ lines: 200, follow })}`, { signal: stop.signal });
        for await (const line of lines(response)) {
          kept.push(line);
          if (kept.length > MAX_LINES) kept.shift();
          drawing ??= setTimeout(draw, 100);
        }
      } catch (found) {
        if (!stop.signal.aborted) setError(found);
      }
    })();
    return () => {
      stop.abort();
      clearTimeout(drawing);
    };
  }, [name, follow]);
  useEffect(() => {
    if (follow && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [shown]);
  return html`<${Card} title="Logs" extra=${html`<label class="check"><input type="checkbox" checked=${follow} onChange=${(event) => setFollow(event.target.checked)} /> Follow</label>`}>
    <${Notice} error=${error} />
    <pre class="logs" ref=${box} tabindex="0" aria-label=${`Log lines of ${name}`}>${shown.length ? shown.join("\n") : "No lines yet."}</pre>
  <//>`;
}

const SETTINGS = [
  { name: "min_instances", label: "Least instances", kind: "whole", note: "0 lets it sleep" },
  { name: "max_instances", label: "Most instances", kind: "whole", optional: true, note: "empty: as many as there are nodes" },
  { name: "target_concurrency", label: "Concurrent calls of an instance", kind: "whole" },
  { name: "keep_alive_s", label: "Keep-alive", kind: "time", note: "without requests, until it stops" },
  { name: "host_keep_alive_s", label: "Keep-alive in host memory", kind: "time" },
  { name: "host_copies", label: "Host copies", kind: "whole" },
  { name: "ttft_target_s", label: "Target of the time to the first token", kind: "time" },
  { name: "tbt_target_s", label: "Target of the time between tokens", kind: "time" },
  { name: "scale_down", label: "Scale down after", kind: "choice", choices: ["start", "delay"], note: "as long as a further start would take, or the delay" },
  { name: "scale_down_delay_s", label: "Delay before scaling down", kind: "time" },
  { name: "live", label: "Serve while it loads", kind: "choice", choices: ["auto", "pipeline", "zigzag", "off"] },
];

const OF_LOAD = new Set(["scale_down", "scale_down_delay_s", "tbt_target_s"]); // that the policy load alone uses

const written = (setting, value) => (value === null || value === undefined ? "" : setting.kind === "time" ? shortDuration(value) : String(value));

function parsed(setting, text) {
  if (setting.kind === "choice") return text;
  if (setting.optional && text.trim() === "") return null;
  const value = setting.kind === "time" ? seconds(text) : /^\d+$/.test(text.trim()) ? Number(text) : null;
  if (value === null) throw new Error(`${setting.label}: ${setting.kind === "time" ? "write 90s, 5m or 1h" : "write a whole number"}.`);
  return value;
}

function Settings({ shown, mayManage, onChanged }) {
  const [error, setError] = useState(null);
  const [saved, setSaved] = useState(false);
  const byLoad = shown.scaling.policy === "load";
  const settings = SETTINGS.filter((one) => one.name in shown.scaling && (byLoad || !OF_LOAD.has(one.name)));
  const save = async (event) => {
    event.preventDefault();
    setError(null);
    setSaved(false);
    const form = new FormData(event.currentTarget);
    try {
      const scaling = {};
      for (const one of settings) {
        const value = parsed(one, form.get(one.name));
        if (value !== shown.scaling[one.name]) scaling[one.name] = value;
      }
      if (Object.keys(scaling).length) await send("PATCH", `admin/functions/${encodeURIComponent(shown.name)}`, { scaling });
      setSaved(true);
      onChanged();
    } catch (found) {
      setError(found);
    }
  };
  return html`<${Card} title="Settings">
    <form class="settings" onSubmit=${save}>
      <fieldset disabled=${!mayManage}>
        ${settings.map(
          (one) => html`<${Field} key=${one.name} label=${one.label} note=${one.note}>
            ${one.kind === "choice"
              ? html`<select name=${one.name} value=${shown.scaling[one.name]}>${one.choices.map((choice) => html`<option selected=${choice === shown.scaling[one.name]}>${choice}</option>`)}</select>`
              : html`<input name=${one.name} defaultValue=${written(one, shown.scaling[one.name])} autocomplete="off" />`}
          <//>`,
        )}
      </fieldset>
      <${Notice} error=${error} />
      ${mayManage && html`<div class="actions"><button class="primary">Save</button>${saved && html`<span class="good" role="status">Saved</span>`}</div>`}
    </form>
    ${shown.decision && html`<h3>Last scaling decision</h3><p>${shown.decision.reason}</p><p class="muted">${ago(shown.decision.at)} ago</p>`}
  <//>`;
}

function Managed({ me, shown, error, again, tab }) {
  const name = shown.name;
  const path = `admin/functions/${encodeURIComponent(name)}`;
  const [dialog, setDialog] = useState(null);
  const known = useCluster(2000).functions.get(name);
  const oversees = me.rights.includes("all-tenants") || shown.owner === me.tenant;
  const mayManage = me.rights.includes("manage-functions") && oversees;
  const version = known?.version;
  useEffect(() => {
    if (version !== undefined && version !== shown.current.version) again();
  }, [version]);
  const tabs = [
    ...(oversees ? [{ id: "instances", label: "Instances" }, { id: "versions", label: "Versions" }] : []),
    ...(mayManage ? [{ id: "logs", label: "Logs" }] : []),
    { id: "settings", label: "Settings" },
    ...(me.rights.includes("call") ? [{ id: "try", label: "Try it" }] : []),
  ];
  const at = tabs.some((one) => one.id === tab) ? tab : tabs[0].id;
  const actions = mayManage
    ? html`<button onClick=${() => setDialog("scale")}>Scale</button><button class="danger-text" onClick=${() => setDialog("delete")}>Delete</button>`
    : null;
  return html`<${Page}
    title=${name}
    intro=${html`${shown.current.task} · version ${shown.current.version} · ${shown.owner ?? "operator"} · ${shown.visibility}`}
    actions=${actions}
  >
    <${Notice} error=${error} />
    ${oversees && html`<${Summary} name=${name} shown=${shown} />`}
    <${Tabs} label=${`Parts of ${name}`} tabs=${tabs} at=${at} onSelect=${(id) => location.replace(`#/functions/${encodeURIComponent(name)}/${id}`)} />
    <div id="tab-panel" role="tabpanel" aria-labelledby=${`tab-${at}`}>
      ${at === "instances" && html`<${Instances} name=${name} />`}
      ${at === "versions" && html`<${Versions} shown=${shown} mayManage=${mayManage} onChanged=${again} />`}
      ${at === "logs" && html`<${Logs} name=${name} />`}
      ${at === "settings" && html`<${Settings} key=${JSON.stringify(shown.scaling)} shown=${shown} mayManage=${mayManage} onChanged=${again} />`}
      ${at === "try" && html`<${TryIt} name=${name} task=${shown.current.task} />`}
    </div>
    ${dialog === "scale" &&
    html`<${Dialog}
      title=${`Scale ${name}`}
      submit="Scale"
      onClose=${() => setDialog(null)}
      onSubmit=${(form) => send("POST", `${path}/scale`, { instances: Number(form.instances), wait: false })}
    >
      <p class="muted">Sets the number once; the autoscaler goes on from there. 0 puts it to sleep until the next request.</p>
      <${Field} label="Instances"><input name="instances" type="number" min="0" max="10000" required defaultValue="1" /><//>
    <//>`}
    ${dialog === "delete" &&
    html`<${Dialog}
      title=${`Delete ${name}?`}
      submit="Delete"
      danger
      onClose=${() => setDialog(null)}
      onSubmit=${async (form) => {
        if (form.name !== name) throw new Error("Type the function's name.");
        await request("DELETE", path);
        location.hash = "#/functions";
      }}
    >
      <p>All versions and their images go; usage records stay.</p>
      <${Field} label=${`Type ${name}`}><input name="name" autocomplete="off" required /><//>
    <//>`}
  <//>`;
}

export function FunctionPage({ me, name, tab }) {
  const sees = me.rights.includes("read-functions");
  const { data, error, again } = useLoaded(
    (signal) => (sees ? get(`admin/functions/${encodeURIComponent(name)}`, { signal }) : Promise.resolve(null)),
    [name],
  );
  const back = html`<p class="back"><a href="#/functions"><${Icon} name="back" size="16" /> Functions</a></p>`;
  if (!sees) {
    return html`${back}<${Page} title=${name}><${TryIt} name=${name} task="generate" /><//>`;
  }
  if (!data) {
    return html`${back}<${Page} title=${name}>${error ? html`<${Notice} error=${error} />` : html`<${Empty}>Loading …<//>`}<//>`;
  }
  return html`${back}<${Managed} me=${me} shown=${data} error=${error} again=${again} tab=${tab} />`;
}
