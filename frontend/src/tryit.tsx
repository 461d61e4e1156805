// A prompt, and what the model says to it: tokens as they come, with what else might have stood there.
import { useEffect, useRef, useState } from "preact/hooks";
import { embedded, type Run } from "./api";
import { number, percent, visible } from "./format";
import { useData } from "./hooks";
import { Choice, Field, Notice } from "./parts";
import { address, go, type Route } from "./route";

interface Said {
  text: string;
  end: boolean;
  probability: number;
  top: { text: string; probability: number }[];
}

interface Event {
  note?: string;
  error?: string;
  prompt?: string;
  samples?: number;
  sample?: number;
  text?: string;
  end?: boolean;
  probability?: number;
  top?: { text: string; probability: number }[];
  done?: boolean;
  cut?: boolean[];
}

export function TryIt({ route, run }: { route: Route; run: Run }) {
  const asked = (name: string, otherwise: string) => route.params.get(name) ?? otherwise;
  const models = useData<{ models: string[] }>(embedded ? null : "models", { run: run.name }, run.stamp);
  const model = asked("model", models.data?.models.at(-1) ?? "");
  const [prompt, setPrompt] = useState(asked("prompt", ""));
  const [answers, setAnswers] = useState<Said[][]>([]);
  const [note, setNote] = useState("");
  const [error, setError] = useState("");
  const [at, setAt] = useState<[number, number] | null>(null);
  const stop = useRef<AbortController | null>(null);
  useEffect(() => () => stop.current?.abort(), []);
  const set = (changes: Record<string, string>) => go(address("try", { run: run.name, model, prompt, samples: asked("samples", ""), temperature: asked("temperature", ""), tokens: asked("tokens", ""), seed: asked("seed", ""), ...changes }), true);
  const ask = async () => {
    if (!prompt || stop.current) return;
    set({});
    stop.current = new AbortController();
    setAnswers([]);
    setError("");
    setAt(null);
    setNote("asking");
    try {
      const body = { run: run.name, model, prompt, samples: Number(asked("samples", "4")), temperature: Number(asked("temperature", "1")), max_new_tokens: Number(asked("tokens", "64")), seed: Number(asked("seed", "0")) };
      const response = await fetch("/api/try", { method: "POST", body: JSON.stringify(body), signal: stop.current.signal });
      if (!response.ok) throw new Error((await response.json()).error);
      await read(response, (event) => {
        if (event.error) setError(event.error);
        if (event.note) setNote(event.note);
        if (event.samples) {
          setNote("sampling");
          setAnswers(Array.from({ length: event.samples }, () => []));
        }
        if (event.sample !== undefined) {
          const said: Said = { text: event.text!, end: event.end!, probability: event.probability!, top: event.top! };
          setAnswers((old) => old.map((each, i) => (i === event.sample ? [...each, said] : each)));
        }
      });
    } catch (problem) {
      if ((problem as Error).name !== "AbortError") setError((problem as Error).message);
    }
    stop.current = null;
    setNote("");
  };
  if (embedded) return <Notice>A file cannot run the model; posttrain view can.</Notice>;
  if (models.data && !models.data.models.length) return <Notice>This run has no trained model yet: the first one comes with a checkpoint, or at the end of a stage.</Notice>;
  const token = at ? answers[at[0]]?.[at[1]] : undefined;
  return (
    <>
      <form
        class="panel try"
        onSubmit={(event) => {
          event.preventDefault();
          void ask();
        }}
      >
        <label class="field wide">
          <span>Prompt</span>
          <textarea
            rows={3}
            value={prompt}
            spellcheck={false}
            onInput={(event) => setPrompt(event.currentTarget.value)}
            onKeyDown={(event) => {
              if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) void ask();
            }}
          />
        </label>
        <div class="bar">
          <Choice label="Model" value={model} options={(models.data?.models ?? []).map((name) => [name, name])} onChange={(value) => set({ model: value })} />
          <Field label="Samples" kind="number" value={asked("samples", "4")} onChange={(value) => set({ samples: value })} />
          <Field label="Temperature" kind="number" value={asked("temperature", "1")} onChange={(value) => set({ temperature: value })} />
          <Field label="Longest" kind="number" value={asked("tokens", "64")} onChange={(value) => set({ tokens: value })} />
          <Field label="Seed" kind="number" value={asked("seed", "0")} onChange={(value) => set({ seed: value })} />
          {note ? <button type="button" onClick={() => stop.current?.abort()}>Stop</button> : <button type="submit" class="main" disabled={!prompt}>Sample</button>}
          <span class="quiet" role="status">{note ? `${note} …` : "Ctrl + Enter samples"}</span>
        </div>
      </form>
      {error && <Notice kind="bad">{error}</Notice>}
      {answers.length > 0 && (
        <div class="reading">
          <ul class="answers">
            {answers.map((said, i) => (
              <li key={i} class="panel">
                <h2>Sample {i + 1} <span class="quiet n">{number(said.reduce((sum, each) => sum + Math.log(each.probability), 0), 4)} nats</span></h2>
                <p class="text">
                  {said.map((each, k) => (
                    <button
                      type="button"
                      key={k}
                      class={`token active ${each.end ? "special" : ""} ${at && at[0] === i && at[1] === k ? "on" : ""}`}
                      style={{ background: `color-mix(in srgb, var(--low) ${Math.round(58 * (1 - each.probability))}%, transparent)` }}
                      onMouseEnter={() => setAt([i, k])}
                      onFocus={() => setAt([i, k])}
                      onClick={() => setAt([i, k])}
                    >
                      {visible(each.text).replace(/\n/g, "↵") + (each.end ? "end" : "") || "·"}
                    </button>
                  ))}
                </p>
              </li>
            ))}
          </ul>
          <aside class="panel numbers" aria-live="polite">
            <h2>{token ? "Instead of it" : "A token"}</h2>
            {token ? (
              <ol class="alternatives">
                {token.top.map((each) => (
                  <li key={each.text}>
                    <span class="mono">{visible(each.text).replace(/\n/g, "↵") || "·"}</span>
                    <span class="track" aria-hidden="true"><span style={{ width: `${100 * each.probability}%` }} /></span>
                    <span class="n">{percent(each.probability)}</span>
                  </li>
                ))}
                <li class="quiet">chosen: {percent(token.probability, 2)}</li>
              </ol>
            ) : (
              <p class="quiet">Point at a token, or tab to it, for its probability and what else the model might have said. The less likely, the stronger the colour.</p>
            )}
          </aside>
        </div>
      )}
    </>
  );
}

async function read(response: Response, on: (event: Event) => void): Promise<void> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop()!;
    for (const line of lines) if (line) on(JSON.parse(line) as Event);
  }
}
