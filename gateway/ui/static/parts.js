// The parts of which the pages are made.
import { html, useEffect, useRef, useState } from "./lib.js";

const PATHS = {
  overview: "M3 12h5v8H3zM10 4h5v16h-5zM17 9h5v11h-5z",
  functions: "M4 5h16v5H4zM4 14h16v5H4zM7 7.5h.01M7 16.5h.01",
  casts: "M5 12h4M9 12c5 0 4-6 9-6M9 12h9M9 12c5 0 4 6 9 6",
  jobs: "M4 6h12M4 12h8M4 18h6M18 11.500v4l2.500 1.500M18 10a5 5 0 1 0 0 10 5 5 0 0 0 0-10z",
  usage: "M12 3v18M16.5 7c-1-1.3-2.6-2-4.5-2-2.5 0-4.5 1.300-4.5 3.400 0 4.700 9.500 2.300 9.500 7 0 2.200-2.200 3.600-5 3.600-2.300 0-4.100-.8-5-2.300",
  keys: "M14.500 9.500a4.500 4.500 0 1 1-3.200-4.300M11 12l9 9M17 18l2.500-2.500",
  audit: "M6 3h9l4 4v14H6zM9 11h7M9 15h7M9 7h3",
  sun: "M12 7a5 5 0 1 0 0 10 5 5 0 0 0 0-10zM12 1v2M12 21v2M1 12h2M21 12h2M4.200 4.200l1.400 1.400M18.400 18.400l1.400 1.400M4.200 19.800l1.400-1.400M18.400 5.600l1.400-1.400",
  moon: "M20 14.500A8.500 8.500 0 1 1 9.500 4a7 7 0 0 0 10.500 10.500z",
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  out: "M10 4H5v16h5M14 8l4 4-4 4M9 12h9",
  play: "M7 4l13 8-13 8z",
  pause: "M7 4h3.500v16H7zM13.500 4H17v16h-3.500z",
  back: "M15 5l-7 7 7 7",
};

export function Icon({ name, size = 20 }) {
  return html`<svg class="icon" width=${size} height=${size} viewBox="0 0 24 24" aria-hidden="true">
    <path d=${PATHS[name]} />
  </svg>`;
}

let shownTitle = null; // a page that is drawn anew, when its data is there, is no other page

export function Page({ title, intro, actions, children }) {
  const heading = useRef();
  useEffect(() => {
    document.title = `${title} · Hypercast`;
    if (title === shownTitle) return;
    if (shownTitle !== null) heading.current?.focus({ preventScroll: true }); // a screen reader reads it
    shownTitle = title;
    window.scrollTo(0, 0);
  }, [title]);
  return html`<header class="page-head">
      <div>
        <h1 ref=${heading} tabindex="-1">${title}</h1>
        ${intro && html`<p class="muted">${intro}</p>`}
      </div>
      ${actions && html`<div class="actions">${actions}</div>`}
    </header>
    ${children}`;
}

export function Card({ title, extra, children, className = "" }) {
  return html`<section class=${`card ${className}`}>
    ${title && html`<div class="card-head"><h2>${title}</h2>${extra && html`<div class="card-extra">${extra}</div>`}</div>`} ${children}
  </section>`;
}

export function Stat({ label, value, note, tone = "" }) {
  return html`<div class="stat">
    <dt>${label}</dt>
    <dd class=${tone}>${value}</dd>
    ${note && html`<dd class="note">${note}</dd>`}
  </div>`;
}

const TONES = {
  ready: "good",
  complete: "good",
  ok: "good",
  source: "info",
  starting: "info",
  loading: "info",
  running: "info",
  draining: "warn",
  cancelled: "warn",
  waiting: "warn",
  failed: "bad",
  lost: "bad",
  revoked: "bad",
  expired: "bad",
};

export function Badge({ children, tone }) {
  return html`<span class=${`badge ${tone ?? TONES[children] ?? ""}`}>${children}</span>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

export function Notice({ error }) {
  return error ? html`<p class="notice" role="alert">${error.message ?? error}</p>` : null;
}

// A table of which a phone shows each row as a block. `columns` are {label, cell(row), num?, wide?}.
export function Table({ caption, columns, rows, keyOf, pageSize = 50, empty = "Nothing yet.", onOpen }) {
  const [page, setPage] = useState(0);
  const pages = Math.max(1, Math.ceil(rows.length / pageSize));
  const at = Math.min(page, pages - 1);
  const shown = rows.slice(at * pageSize, (at + 1) * pageSize);
  if (!rows.length) return html`<${Empty}>${empty}<//>`;
  return html`<div class="table-box">
      <table>
        <caption class="hidden">
          ${caption}
        </caption>
        <thead>
          <tr>
            ${columns.map((one) => html`<th scope="col" class=${one.num ? "num" : ""}>${one.label}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${shown.map(
            (row) => html`<tr key=${keyOf(row)} class=${onOpen ? "opens" : ""} onClick=${onOpen && (() => onOpen(row))}>
              ${columns.map(
                (one) =>
                  html`<td class=${`${one.num ? "num" : ""} ${one.wide ? "wide" : ""}`} data-label=${one.label}>
                    <div>${one.cell(row)}</div>
                  </td>`,
              )}
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${pages > 1 &&
    html`<nav class="pager" aria-label=${`Pages of ${caption}`}>
      <button class="small" disabled=${at === 0} onClick=${() => setPage(at - 1)}>Previous</button>
      <span class="muted">${at * pageSize + 1}–${at * pageSize + shown.length} of ${rows.length}</span>
      <button class="small" disabled=${at === pages - 1} onClick=${() => setPage(at + 1)}>Next</button>
    </nav>`}`;
}

export function Tabs({ label, tabs, at, onSelect, panel = "tab-panel" }) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const index = tabs.findIndex((one) => one.id === at);
    const next = tabs[(index + step + tabs.length) % tabs.length];
    onSelect(next.id);
    event.currentTarget.querySelector(`[data-tab="${next.id}"]`)?.focus();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} onKeyDown=${move}>
    ${tabs.map(
      (one) =>
        html`<button
          role="tab"
          id=${`tab-${one.id}`}
          data-tab=${one.id}
          aria-selected=${one.id === at}
          aria-controls=${panel}
          tabindex=${one.id === at ? 0 : -1}
          onClick=${() => onSelect(one.id)}
        >
          ${one.label}
        </button>`,
    )}
  </div>`;
}

export function Field({ label, note, children, className = "" }) {
  return html`<label class=${`field ${className}`}><span>${label}</span>${children}${note && html`<small>${note}</small>`}</label>`;
}

// A dialog with a form; `onSubmit` gets its fields, and an error that it throws is shown there.
export function Dialog({ title, submit = "Save", danger = false, onSubmit, onClose, children }) {
  const dialog = useRef();
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const send = async (event) => {
    event.preventDefault();
    if (!onSubmit) return onClose();
    setBusy(true);
    setError(null);
    try {
      await onSubmit(Object.fromEntries(new FormData(event.currentTarget)));
      onClose();
    } catch (found) {
      setError(found);
    }
    setBusy(false);
  };
  return html`<dialog ref=${dialog} onClose=${onClose} aria-label=${title}>
    <form onSubmit=${send}>
      <h2>${title}</h2>
      ${children}
      <${Notice} error=${error} />
      <div class="dialog-actions">
        ${onSubmit && html`<button type="button" onClick=${onClose}>Cancel</button>`}
        <button class=${danger ? "danger" : "primary"} disabled=${busy}>${onSubmit ? submit : "Close"}</button>
      </div>
    </form>
  </dialog>`;
}

export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      return; // a page without TLS has no clipboard: the text can be selected
    }
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button type="button" class="small" onClick=${copy}>${done ? "Copied" : label}</button>`;
}

export function Code({ text, label }) {
  return html`<div class="code">
    <${Copy} text=${text} />
    <pre tabindex="0" aria-label=${label}><code>${text}</code></pre>
  </div>`;
}

export function Meter({ value, max, label }) {
  const share = max > 0 ? Math.min(1, value / max) : 0;
  return html`<svg class="meter" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=${label}>
    <rect width="100" height="6" class="meter-rail" />
    <rect width=${share * 100} height="6" class=${share > 0.9 ? "meter-full" : "meter-fill"} />
  </svg>`;
}

// Load with `load(signal)` at first and whenever `keys` change; returns {data, error, busy, again}.
export function useLoaded(load, keys) {
  const [found, setFound] = useState({ data: null, error: null, busy: true });
  const [round, setRound] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    setFound((before) => ({ ...before, busy: true }));
    load(stop.signal).then(
      (data) => stop.signal.aborted || setFound({ data, error: null, busy: false }),
      (error) => stop.signal.aborted || setFound((before) => ({ ...before, error, busy: false })),
    );
    return () => stop.abort();
  }, [...keys, round]);
  return { ...found, again: () => setRound((number) => number + 1) };
}
