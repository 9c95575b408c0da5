// Call a function from the browser, with the same call for curl and Python.
import { address, events, get, request } from "./api.js";
import { ms, rate } from "./format.js";
import { html, useEffect, useRef, useState } from "./lib.js";
import { Card, Code, Field, Notice, Tabs } from "./parts.js";

const MAX_SHOWN = 200_000; // characters of an answer
const MAX_VALUES = 8; // of a vector

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const python = (value) => JSON.stringify(value).replaceAll("true", "True").replaceAll("false", "False").replaceAll("null", "None");

// What is called, as {path, body, curl, python}.
function call(name, task, fields) {
  const { form, prompt, maxTokens, temperature, stream } = fields;
  if (task === "generate") {
    const common = { model: name, ...(maxTokens ? { max_tokens: maxTokens } : {}), temperature, ...(stream ? { stream: true } : {}) };
    if (form === "chat") return openai("v1/chat/completions", { ...common, messages: [{ role: "user", content: prompt }] }, "chat.completions", stream, "delta.content", "message.content");
    return openai("v1/completions", { ...common, prompt }, "completions", stream, "text", "text");
  }
  if (task === "embed") {
    const body = { model: name, input: prompt };
    return {
      path: "v1/embeddings",
      body,
      curl: curl("v1/embeddings", body),
      python: `${CLIENT}answer = client.embeddings.create(model=${python(name)}, input=${python(prompt)})\nprint(answer.data[0].embedding[:8])`,
    };
  }
  const path = `functions/${encodeURIComponent(name)}/invoke`;
  if (task === "classify") {
    return {
      path,
      body: null,
      curl: `curl ${address()}/${path} \\\n  -H "authorization: Bearer $HYPERCAST_API_KEY" \\\n  -H 'content-type: image/png' --data-binary @image.png`,
      python: `import os, requests\n\nwith open("image.png", "rb") as image:\n    answer = requests.post(\n        "${address()}/${path}",\n        headers={"authorization": f"Bearer {os.environ['HYPERCAST_API_KEY']}", "content-type": "image/png"},\n        data=image,\n    )\nprint(answer.json())`,
    };
  }
  let body = prompt;
  try {
    body = task === "features" ? { text: prompt } : JSON.parse(prompt);
  } catch {
    return { path, error: "The body is not JSON yet.", curl: "", python: "" };
  }
  return {
    path,
    body,
    curl: curl(path, body),
    python: `import os, requests\n\nanswer = requests.post(\n    "${address()}/${path}",\n    headers={"authorization": f"Bearer {os.environ['HYPERCAST_API_KEY']}"},\n    json=${python(body)},\n)\nprint(answer.json())`,
  };
}

const CLIENT = `import os\nfrom openai import OpenAI\n\nclient = OpenAI(base_url="${address()}/v1", api_key=os.environ["HYPERCAST_API_KEY"])\n`;

const curl = (path, body, stream) =>
  `curl ${stream ? "-N " : ""}${address()}/${path} \\\n  -H "authorization: Bearer $HYPERCAST_API_KEY" \\\n  -H 'content-type: application/json' \\\n  -d ${quoted(JSON.stringify(body))}`;

function openai(path, body, method, stream, chunk, whole) {
  const args = Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},`).join("\n");
  const made = `client.${method}.create(\n${args}\n)`;
  const code = stream
    ? `${CLIENT}for chunk in ${made}:\n    print(chunk.choices[0].${chunk} or "", end="", flush=True)`
    : `${CLIENT}answer = ${made}\nprint(answer.choices[0].${whole})`;
  return { path, body, curl: curl(path, body, stream), python: code };
}

function readable(answer) {
  const choice = answer.choices?.[0];
  if (choice) return choice.text ?? choice.message?.content ?? JSON.stringify(choice.message, null, 2);
  const vector = answer.data?.[0]?.embedding ?? answer.features?.[0];
  if (vector) return `${vector.length} numbers: ${vector.slice(0, MAX_VALUES).map((value) => value.toFixed(4)).join(", ")}, …`;
  if (answer.labels) return answer.labels.map((one) => `${(one.score * 100).toFixed(1).padStart(5)} %  ${one.label}`).join("\n");
  return JSON.stringify(answer, null, 2);
}

function useTask(name, given) {
  const [task, setTask] = useState(given);
  useEffect(() => {
    let left = false;
    get(`admin/functions/${encodeURIComponent(name)}`).then((found) => left || setTask(found.current.task), () => {});
    return () => {
      left = true;
    };
  }, [name]);
  return task;
}

export function TryIt({ name, task: given }) {
  const task = useTask(name, given);
  const [form, setForm] = useState("completion");
  const [prompt, setPrompt] = useState(given === "handler" ? '{"message": "hello"}' : "");
  const [maxTokens, setMaxTokens] = useState("64");
  const [temperature, setTemperature] = useState("0.7");
  const [stream, setStream] = useState(true);
  const [image, setImage] = useState(null);
  const [shown, setShown] = useState({ text: "", stage: "", facts: null });
  const [error, setError] = useState(null);
  const [running, setRunning] = useState(null);
  const [language, setLanguage] = useState("curl");
  const stop = useRef(null);
  useEffect(() => () => stop.current?.abort(), []);

  const streams = task === "generate" && stream;
  const what = call(name, task, { form, prompt, maxTokens: Number(maxTokens) || undefined, temperature: Number(temperature) || 0, stream: streams });

  const run = async (event) => {
    event.preventDefault();
    const aborter = new AbortController();
    stop.current = aborter;
    setRunning(true);
    setError(null);
    setShown({ text: "", stage: "queue", facts: null });
    const began = performance.now();
    let first = null;
    let tokens = 0;
    let text = "";
    const facts = (response, more = {}) => ({
      first,
      total: performance.now() - began,
      tokens,
      kind: more.x_start_kind ?? response?.headers.get("x-start-kind"),
      node: more.node,
      timing: response?.headers.get("server-timing"),
      id: response?.headers.get("x-request-id"),
    });
    try {
      const body = task === "classify" ? image : what.body;
      const headers = task === "classify" ? { "content-type": image.type } : task === "handler" ? { accept: "text/event-stream" } : {};
      const response = await request("POST", what.path, { body, headers, signal: aborter.signal });
      let more = {};
      if (response.headers.get("content-type")?.startsWith("text/event-stream")) {
        let drawing = null;
        const draw = () => {
          drawing = null;
          setShown({ text: text.slice(0, MAX_SHOWN), stage: "", facts: facts(response, more) });
        };
        for await (const { data, comment } of events(response)) {
          if (comment?.startsWith("stage=")) setShown((before) => ({ ...before, stage: comment.slice(6) }));
          if (data === undefined || data === "[DONE]") continue;
          const piece = JSON.parse(data);
          if (piece.error) throw new Error(piece.error.message);
          if (piece.hypercast) more = piece.hypercast;
          const choice = piece.choices?.[0];
          const added = choice ? (choice.text ?? choice.delta?.content ?? "") : task === "handler" ? `${data}\n` : "";
          if (added) {
            first ??= performance.now() - began;
            tokens += 1;
            text += added;
          }
          drawing ??= requestAnimationFrame(draw);
        }
        cancelAnimationFrame(drawing);
        setShown({ text: text.slice(0, MAX_SHOWN), stage: "", facts: facts(response, more) });
      } else {
        const answer = await response.json();
        tokens = answer.usage?.completion_tokens ?? 0;
        setShown({ text: readable(answer).slice(0, MAX_SHOWN), stage: "", facts: facts(response) });
      }
    } catch (found) {
      if (found.name !== "AbortError") setError(found);
      setShown((before) => ({ ...before, stage: "" }));
    }
    setRunning(false);
  };

  const noted = shown.facts;
  return html`<div class="grid try">
    <${Card} title="Request">
      <form onSubmit=${run}>
        ${task === "generate" &&
        html`<${Field} label="Form"><select value=${form} onChange=${(event) => setForm(event.target.value)}><option value="completion">Completion</option><option value="chat">Chat</option></select><//>`}
        ${task === "classify"
          ? html`<${Field} label="Image"><input type="file" accept="image/*" required onChange=${(event) => setImage(event.target.files[0] ?? null)} /><//>`
          : html`<${Field} label=${task === "handler" ? "JSON body" : form === "chat" && task === "generate" ? "Message" : task === "generate" ? "Prompt" : "Text"}>
              <textarea name="prompt" rows="6" required value=${prompt} onInput=${(event) => setPrompt(event.target.value)} spellcheck="false"></textarea>
            <//>`}
        ${task === "generate" &&
        html`<div class="fields">
          <${Field} label="Tokens, at most"><input type="number" min="1" max="100000" value=${maxTokens} onInput=${(event) => setMaxTokens(event.target.value)} /><//>
          <${Field} label="Temperature"><input type="number" min="0" max="2" step="0.1" value=${temperature} onInput=${(event) => setTemperature(event.target.value)} /><//>
          <label class="check"><input type="checkbox" checked=${stream} onChange=${(event) => setStream(event.target.checked)} /> Stream</label>
        </div>`}
        <div class="actions">
          <button class="primary" disabled=${running || what.error}>Run</button>
          ${running && html`<button type="button" onClick=${() => stop.current?.abort()}>Stop</button>`}
          ${what.error && html`<span class="muted">${what.error}</span>`}
        </div>
      </form>
    <//>
    <${Card} title="Answer" extra=${running ? html`<span class="muted" role="status">${shown.stage || "running"}</span>` : null}>
      <${Notice} error=${error} />
      <pre class="answer" tabindex="0" aria-label="Answer" aria-busy=${Boolean(running)}>${shown.text || (running ? "…" : "Nothing yet.")}</pre>
      ${noted &&
      html`<dl class="facts">
        ${noted.first !== null && html`<div><dt>First token</dt><dd>${ms(noted.first)}</dd></div>`}
        <div><dt>Total</dt><dd>${ms(noted.total)}</dd></div>
        ${noted.tokens > 1 && noted.first !== null && html`<div><dt>Tokens/s</dt><dd>${rate(((noted.tokens - 1) / Math.max(1, noted.total - noted.first)) * 1000)}</dd></div>`}
        ${noted.kind && html`<div><dt>Start</dt><dd>${noted.kind}</dd></div>`}
        ${noted.node && html`<div><dt>Node</dt><dd>${noted.node}</dd></div>`}
        ${noted.id && html`<div class="whole"><dt>Request</dt><dd><code>${noted.id}</code></dd></div>`}
      </dl>`}
    <//>
    <${Card} title="The same call" className="span">
      <${Tabs} label="Language" tabs=${[{ id: "curl", label: "curl" }, { id: "python", label: "Python" }]} at=${language} onSelect=${setLanguage} panel="code-panel" />
      <div id="code-panel" role="tabpanel" aria-labelledby=${`tab-${language}`}>
        <${Code} label=${`The call in ${language}`} text=${language === "curl" ? what.curl : what.python} />
      </div>
    <//>
  </div>`;
}
