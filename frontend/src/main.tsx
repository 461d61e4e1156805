import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { embedded, type Run } from "./api";
import { Compare } from "./compare";
import { Explain } from "./explain";
import { visible } from "./format";
import { Groups } from "./groups";
import { useData, useKeys, useRuns } from "./hooks";
import { Overview } from "./overview";
import { Notice } from "./parts";
import { address, followed, go, type Route, useRoute } from "./route";
import { Tokens } from "./tokens";
import { TryIt } from "./tryit";
import type { GroupPage } from "./api";

const PAGES: [string, string][] = [
  ["overview", "Overview"],
  ["groups", "Groups"],
  ["tokens", "Tokens"],
  ["explain", "Explain"],
  ["compare", "Compare"],
  ["try", "Try it"],
];
const MOST_OVERLAID = 4;

function App() {
  const route = useRoute();
  const { runs, leftOut, error, ready } = useRuns();
  const [help, setHelp] = useState(false);
  const named = route.params.getAll("run").filter((name) => runs.some((run) => run.name === name));
  const chosen = (named.length ? named : runs.slice(0, 1).map((run) => run.name)).slice(0, MOST_OVERLAID);
  const run = runs.find((each) => each.name === chosen[0]);
  const place = { step: route.params.get("step"), group: route.params.get("group"), sample: route.params.get("sample") };
  const to = (page: string) => address(page, { run: page === "overview" ? chosen : chosen[0], ...(page === "tokens" || page === "explain" ? place : {}) });
  useKeys({
    ...Object.fromEntries(PAGES.map(([page], i) => [String(i + 1), () => go(to(page))])),
    "?": () => setHelp((on) => !on),
    Escape: () => setHelp(false),
  });
  useEffect(() => {
    const title = PAGES.find(([page]) => page === route.page)?.[1] ?? "posttrain";
    document.title = `${title}${run ? ` · ${run.name}` : ""} · posttrain`;
  }, [route.page, run?.name]);
  return (
    <div onClick={followed}>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>Skip to the content</a>
      <header class="head">
        <div class="row">
          <a class="brand" href={to("overview")}>posttrain</a>
          <RunPicker runs={runs} chosen={chosen} route={route} />
          <button type="button" class="plain" onClick={() => setHelp(true)} aria-label="Keys">?</button>
        </div>
        <nav class="pages" aria-label="Pages">
          {PAGES.filter(([page]) => !(embedded && page === "try")).map(([page, title], i) => (
            <a key={page} href={to(page)} aria-current={route.page === page ? "page" : undefined} title={`key ${i + 1}`}>{title}</a>
          ))}
        </nav>
      </header>
      <main id="main" tabIndex={-1}>
        {error && <Notice kind="bad">{error}</Notice>}
        {ready && !runs.length && !error && <Notice>There are no runs here yet: <code>posttrain run RECIPE.toml</code> makes one.</Notice>}
        {leftOut > 0 && <Notice>{leftOut === 1 ? "One older run is" : `${leftOut} older runs are`} not listed: name a folder of its own to <code>posttrain view</code> to see it.</Notice>}
        {run?.problem && <Notice kind="bad">This run cannot be read: {run.problem}</Notice>}
        {run && !run.problem && <Page route={route} run={run} runs={runs} chosen={chosen} />}
      </main>
      {embedded && <footer class="foot quiet">Written by posttrain {embedded.written}; <code>posttrain view</code> shows all of a run.</footer>}
      {help && <Help onClose={() => setHelp(false)} />}
    </div>
  );
}

function Page({ route, run, runs, chosen }: { route: Route; run: Run; runs: Run[]; chosen: string[] }) {
  const adapters = runs.filter((each) => each.name.startsWith(`${run.name}/adapters/`));
  if (adapters.length && !run.stages.length && !run.has_rollouts) return <Adapters run={run} adapters={adapters.map((each) => each.name)} />;
  const rollouts = ["groups", "tokens", "explain"].includes(route.page);
  if (rollouts && !run.has_rollouts) return <Notice>This run has no rollouts; they come with the stage rl.</Notice>;
  if (route.page === "groups") return <Groups route={route} run={run} />;
  if (route.page === "compare") return <Compare route={route} run={run} runs={runs} />;
  if (route.page === "try") return <TryIt key={run.name} route={route} run={run} />;
  if (route.page === "tokens" || route.page === "explain") {
    if (route.params.get("step") === null) return <FirstRollout run={run} page={route.page} />;
    return route.page === "tokens" ? <Tokens route={route} run={run} /> : <Explain route={route} run={run} />;
  }
  return <Overview route={route} runs={runs} chosen={chosen} />;
}

// A run of several adapters has no numbers of its own: each of them is a run.
function Adapters({ run, adapters }: { run: Run; adapters: string[] }) {
  return (
    <section class="panel" aria-label="Adapters">
      <h2>{visible(run.name)} trained {adapters.length} adapters on one base</h2>
      <p>Each of them is a run of its own: <a href={address("overview", { run: adapters.slice(0, MOST_OVERLAID) })}>{adapters.length > MOST_OVERLAID ? `the first ${MOST_OVERLAID}` : "all"} over each other</a>, or one alone:</p>
      <ul>
        {adapters.map((name) => <li key={name}><a href={address("overview", { run: name })}>{visible(name)}</a></li>)}
      </ul>
    </section>
  );
}

// Without a rollout in the address, the group of the last step whose rewards differ most is shown.
function FirstRollout({ run, page }: { run: Run; page: string }) {
  const found = useData<GroupPage>("groups", { run: run.name, sort: "spread", descending: "1", limit: 1, first_step: embedded ? undefined : Math.max(1, (run.steps_done ?? 1) - 20) }, run.stamp);
  useEffect(() => {
    const group = found.data?.groups[0];
    if (!group) return;
    const best = group.members.reduce((a, b) => ((b.advantage ?? 0) > (a.advantage ?? 0) ? b : a));
    go(address(page, { run: run.name, step: group.step, group: group.group, sample: (page === "explain" ? best : group.members[0]!).sample }), true);
  }, [found.data]);
  return found.error ? <Notice kind="bad">{found.error}</Notice> : <Notice>{found.loading ? "Looking for a rollout …" : "There are no rollouts yet."}</Notice>;
}

function RunPicker({ runs, chosen, route }: { runs: Run[]; chosen: string[]; route: Route }) {
  const rest = runs.filter((run) => !chosen.includes(run.name));
  const overlays = route.page === "overview";
  const choose = (names: string[]) => {
    const kept = Object.fromEntries([...route.params].filter(([key]) => ["view", "stage", "smooth"].includes(key)));
    go(address(route.page, { ...kept, run: names }));
  };
  return (
    <div class="runs">
      <label class="field inline">
        <span class="away">Run</span>
        {overlays && chosen.length > 1 && <span class="swatch c0" aria-hidden="true" />}
        <select value={chosen[0] ?? ""} onChange={(event) => choose([event.currentTarget.value])}>
          {runs.map((run) => <option key={run.name} value={run.name}>{visible(run.name)}{run.state === "running" ? " (running)" : ""}</option>)}
        </select>
      </label>
      {overlays && chosen.slice(1).map((name, i) => (
        <span key={name} class="chip">
          <span class={`swatch c${i + 1}`} aria-hidden="true" />{visible(name)}
          <button type="button" class="plain" aria-label={`Remove ${name}`} onClick={() => choose(chosen.filter((each) => each !== name))}>×</button>
        </span>
      ))}
      {overlays && rest.length > 0 && chosen.length < MOST_OVERLAID && (
        <label class="field inline">
          <span class="away">Lay another run over it</span>
          <select value="" onChange={(event) => choose([...chosen, event.currentTarget.value])}>
            <option value="">+ compare with …</option>
            {rest.map((run) => <option key={run.name} value={run.name}>{visible(run.name)}</option>)}
          </select>
        </label>
      )}
    </div>
  );
}

function Help({ onClose }: { onClose: () => void }) {
  const keys: [string, string][] = [
    ["1 … 6", "the pages"],
    ["/", "search in groups"],
    ["n, p", "next and previous page of groups"],
    ["[ and ]", "step before and after; on Tokens, the other completions"],
    ["← and →", "on Tokens, and on a chart that has the focus: one further"],
    ["Enter", "on a chart: what was written at that step"],
    ["Ctrl + Enter", "on Try it: sample"],
    ["Esc", "leave a field, close this"],
  ];
  return (
    <div class="veil" onClick={onClose}>
      <div class="panel help" role="dialog" aria-modal="true" aria-label="Keys" onClick={(event) => event.stopPropagation()}>
        <h2>Keys</h2>
        <dl>
          {keys.map(([key, text]) => (
            <div key={key}>
              <dt><kbd>{key}</kbd></dt>
              <dd>{text}</dd>
            </div>
          ))}
        </dl>
        <button type="button" autofocus onClick={onClose}>Close</button>
      </div>
    </div>
  );
}

render(<App />, document.getElementById("app")!);
