// The console: sign-in, navigation and pages.
import { forgetKey, get, storeKey, storedKey, whenRefused } from "./api.js";
import { AuditPage } from "./audit.js";
import { CastsPage } from "./casts.js";
import { FunctionPage } from "./function.js";
import { FunctionsPage } from "./functions.js";
import { JobsPage } from "./jobs.js";
import { KeysPage } from "./keys.js";
import { html, render, useEffect, useState } from "./lib.js";
import { OverviewPage } from "./overview.js";
import { Icon, Notice } from "./parts.js";
import { ReplayPage } from "./replay.js";
import { end, start, useCluster } from "./store.js";
import { UsagePage } from "./usage.js";

const THEME = "hypercast.theme";
const THEMES = ["auto", "light", "dark"];
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" };

// `needs` is the right that a page needs of the key (gateway/core/rights.py).
const PAGES = [
  { path: "", name: "Overview", icon: "overview", page: OverviewPage },
  { path: "functions", name: "Functions", icon: "functions", page: FunctionsPage },
  { path: "casts", name: "Casts", icon: "casts", needs: "read-functions", page: CastsPage },
  { path: "jobs", name: "Jobs", icon: "jobs", needs: "call", page: JobsPage },
  { path: "usage", name: "Usage", icon: "usage", needs: "read-usage", page: UsagePage },
  { path: "keys", name: "Keys", icon: "keys", page: KeysPage },
  { path: "audit", name: "Audit", icon: "audit", needs: "admin", page: AuditPage },
];

// The path behind the # as its parts, decoded.
function useRoute() {
  const read = () => location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const changed = () => setRoute(read());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

function useTheme() {
  const [theme, setTheme] = useState(() => {
    const stored = localStorage.getItem(THEME);
    return THEMES.includes(stored) ? stored : "auto";
  });
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(THEME, theme);
    dispatchEvent(new Event("themechange"));
  }, [theme]);
  return [theme, () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length])];
}

function SignIn({ reason, onSignedIn }) {
  const [error, setError] = useState(reason);
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const key = new FormData(event.currentTarget).get("key").trim();
    setBusy(true);
    storeKey(key);
    try {
      onSignedIn(await get("admin/me", { quiet: true }));
    } catch (found) {
      forgetKey();
      setError(found.status === 401 ? "This key is unknown, revoked or expired." : found.message);
      setBusy(false);
    }
  };
  return html`<main class="sign-in">
    <form class="card" onSubmit=${submit}>
      <img src="ui/icon.svg" alt="" width="44" height="44" />
      <h1>Hypercast</h1>
      <label class="field">
        <span>API key</span>
        <input name="key" type="password" autocomplete="off" spellcheck="false" required placeholder="hc_…" autofocus />
        <small>It stays in this tab, and is gone when you close it. The first admin key is in the gateway's data directory: admin.key</small>
      </label>
      <${Notice} error=${error} />
      <button class="primary" disabled=${busy}>Sign in</button>
      <p class="muted">or <a href="#/replay">open a recorded run</a>, which needs no key</p>
    </form>
  </main>`;
}

function Connection() {
  const { status, reason } = useCluster(1000);
  if (status === "off") return null;
  const text = { live: "Live", connecting: "Connecting", lost: "Reconnecting" }[status];
  return html`<span class=${`connection ${status}`} role="status" title=${status === "lost" ? reason : ""}>${text}</span>`;
}

function Shell({ me, theme, onTheme, onSignOut, at, children }) {
  const pages = PAGES.filter((page) => !page.needs || me.rights.includes(page.needs));
  return html`<a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main").focus();
    }}>Skip to the page</a>
    <div class="shell">
      <aside>
        <a class="brand" href="#/"><img src="ui/icon.svg" alt="" width="28" height="28" /><span>Hypercast</span></a>
        <nav aria-label="Pages">
          ${pages.map(
            (page) => html`<a href=${`#/${page.path}`} aria-current=${page.path === at ? "page" : null}>
              <${Icon} name=${page.icon} /><span>${page.name}</span>
            </a>`,
          )}
        </nav>
        <div class="who">
          <${Connection} />
          <div class="who-key">
            <strong title=${`key ${me.id}`}>${me.tenant}</strong>
            <span class="muted">${me.role}</span>
          </div>
          <div class="who-actions">
            <button class="bare" onClick=${onTheme} aria-label=${`Colours: ${theme}. Change`} title=${`Colours: ${theme}`}>
              <${Icon} name=${THEME_ICONS[theme]} size="18" />
            </button>
            <button class="bare" onClick=${onSignOut} aria-label="Sign out" title="Sign out"><${Icon} name="out" size="18" /></button>
          </div>
        </div>
      </aside>
      <main id="main" tabindex="-1">${children}</main>
    </div>`;
}

function App() {
  const route = useRoute();
  const [theme, nextTheme] = useTheme();
  const [me, setMe] = useState(null);
  const [reason, setReason] = useState("");
  const [restoring, setRestoring] = useState(storedKey() !== null);

  const signOut = (why = "") => {
    forgetKey();
    end();
    setMe(null);
    setReason(why);
  };
  const signIn = (found) => {
    setReason("");
    setMe(found);
    if (found.rights.includes("read-functions")) start();
  };
  useEffect(() => {
    whenRefused(() => signOut("This key is not valid any more."));
    if (storedKey() !== null) {
      get("admin/me", { quiet: true }).then(signIn, (error) => signOut(error.message)).finally(() => setRestoring(false));
    }
  }, []);

  if (restoring) return html`<p class="empty" role="status">Connecting …</p>`;
  const [at, name, tab] = route;
  if (at === "replay" && me === null) {
    return html`<main class="alone"><p><a href="#/">Sign in</a></p><${ReplayPage} /></main>`;
  }
  if (me === null) return html`<${SignIn} key=${reason} reason=${reason} onSignedIn=${signIn} />`;
  const known = PAGES.find((page) => page.path === at);
  let page = html`<p class="empty">There is no such page. <a href="#/">Overview</a></p>`;
  if (at === "replay") page = html`<${ReplayPage} />`;
  else if (at === "functions" && name) page = html`<${FunctionPage} key=${name} me=${me} name=${name} tab=${tab} />`;
  else if (known) page = html`<${known.page} me=${me} name=${name} />`;
  const shown = at === "replay" ? "casts" : at;
  return html`<${Shell} me=${me} theme=${theme} onTheme=${nextTheme} onSignOut=${() => signOut()} at=${shown}>${page}<//>`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
