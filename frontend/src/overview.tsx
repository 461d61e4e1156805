import type { ChartData, Charts, Curve, Finding, Run, Settings } from "./api";
import { Chart, type Series } from "./chart";
import { count, duration, number, percent, signed, visible } from "./format";
import { useData } from "./hooks";
import { Choice, Coded, Notice } from "./parts";
import { address, go, type Route } from "./route";

const TITLES: Record<string, string> = { sft: "Supervised fine-tuning", reward: "Reward model", dpo: "Preferences (DPO)", rl: "Reinforcement learning" };
const SMOOTHING: [string, string][] = [["0", "none"], ["0.6", "some"], ["0.9", "much"], ["0.97", "very much"]];

export function Overview({ route, runs, chosen }: { route: Route; runs: Run[]; chosen: string[] }) {
  const stage = route.params.get("stage") ?? "";
  const smoothing = route.params.get("smooth") ?? "0.6";
  const first = useRunCharts(chosen[0], stage, runs);
  const shownStage = first.data?.stage ?? stage;
  // Hooks in a fixed number: up to four runs lie over each other.
  const others = [1, 2, 3].map((i) => useRunCharts(chosen[i], shownStage, runs));
  const all = [first, ...others].filter((_, i) => i < chosen.length);
  const run = runs.find((each) => each.name === chosen[0]);
  const set = (changes: Record<string, string>) =>
    go(address("overview", { run: chosen, stage: shownStage, smooth: smoothing, ...changes }), true);
  if (!run) return null;
  const loaded = all.map((each) => each.data).filter((each): each is Charts => each !== null);
  const findings = loaded.flatMap((each) => each.findings.map((finding) => ({ ...finding, run: each.run })));
  return (
    <>
      <Results run={run} charts={first.data} />
      <Questions run={run} chosen={chosen} runs={runs} />
      <Diagnosis findings={findings} unjudged={loaded.map((each) => each.unjudged).find(Boolean) ?? ""} several={chosen.length > 1} ready={loaded.length > 0} />
      <div class="bar">
        {(first.data?.stages.length ?? 0) > 1 && (
          <Choice label="Stage" value={shownStage} onChange={(value) => set({ stage: value })} options={first.data!.stages.map((name) => [name, TITLES[name] ?? name])} />
        )}
        <Choice label="Smoothing" value={smoothing} onChange={(value) => set({ smooth: value })} options={SMOOTHING} />
        <p class="quiet hint">Click a chart to see what was written at that step.</p>
      </div>
      {all.map((each, i) => each.error && <Notice key={i} kind="bad">{each.error}</Notice>)}
      {first.data && !first.data.charts.length && <Notice>Nothing was logged yet; curves appear with the first step.</Notice>}
      <div class="charts">
        {merged(loaded).map(({ chart, series }) => (
          <Chart
            key={chart.key}
            chart={chart}
            series={series}
            several={loaded.length > 1}
            findings={loaded.length > 1 ? [] : (first.data?.findings ?? [])}
            smoothing={Number(smoothing)}
            last={Math.max(1, ...loaded.map((each) => each.last_step))}
            onStep={(step) => go(address("groups", { run: chosen[0], first_step: Math.max(1, step), last_step: Math.max(1, step) }))}
          />
        ))}
      </div>
      {first.data && <HeldOut charts={first.data} />}
      <Configuration chosen={chosen} ways={first.data?.ways ?? {}} />
    </>
  );
}

function useRunCharts(name: string | undefined, stage: string, runs: Run[]) {
  const run = runs.find((each) => each.name === name);
  const wanted = stage || (run?.stages.includes("rl") || run?.has_rollouts || !run?.stages.length ? "rl" : (run?.stages.at(-1) ?? "rl"));
  const known = ["sft", "reward", "dpo", "rl"].includes(wanted) ? wanted : "rl";
  return useData<Charts>(name ? "charts" : null, { run: name, stage: known }, run?.stamp);
}

// The charts of all runs by their keys; of one run each curve has a colour, of several each run.
function merged(all: Charts[]): { chart: ChartData; series: Series[] }[] {
  const keys = [...new Set(all.flatMap((each) => each.charts.map((chart) => chart.key)))];
  return keys.map((key) => {
    const found = all.flatMap((each, place) =>
      each.charts.filter((chart) => chart.key === key).map((chart) => ({ chart, place, run: each.run })),
    );
    const series = found.flatMap(({ chart, place, run }) =>
      chart.curves.map((curve, i) => ({ run, curve, colour: all.length > 1 ? place : i, dash: all.length > 1 ? i : 0 })),
    );
    const chart = found[0]!.chart;
    if (all.length > 1 && SUMMED[key]) {
      const sums = found.map(({ chart: own, place, run }) => ({ run, colour: place, dash: 0, curve: summed(own, SUMMED[key]!) }));
      return { chart: { ...chart, stacked: false }, series: sums };
    }
    return { chart, series };
  });
}

// With several runs these are drawn as one number of each run.
const SUMMED: Record<string, string> = { time: "seconds", clip: "clipped" };

function summed(chart: ChartData, label: string): Curve {
  const first = chart.curves[0]!;
  const values = first.values.map((_, i) => chart.curves.reduce((sum, each) => sum + (each.values[i] ?? 0), 0));
  return { ...first, label, values };
}

function Results({ run, charts }: { run: Run; charts: Charts | null }) {
  const done = run.steps_done === null ? "–" : count(run.steps_done);
  const over = run.reward_steps === 1 ? "step" : `${run.reward_steps} steps`;
  return (
    <div class="cards">
      {charts?.results.map((each) => (
        <div class="card" key={each.label}>
          <span>{each.label}</span>
          {each.note ? <b>{each.note}</b> : <b class="n">{percent(each.before?.[0])} → {percent(each.after?.[0])}</b>}
          {each.after && <small class="n">95 %: {percent(each.after[1], 0)} to {percent(each.after[2], 0)}</small>}
        </div>
      ))}
      <div class="card">
        <span>training reward</span>
        <b class="n">{number(run.reward_first, 3)} → {number(run.reward_last, 3)}</b>
        <small>{run.reward_steps ? `first and last ${over}` : "no step yet"}</small>
      </div>
      <div class="card">
        <span>{run.algorithm ?? "stages"}</span>
        <b class="n">{done}{run.steps && run.steps !== run.steps_done ? ` of ${count(run.steps)}` : ""} steps</b>
        <small>{run.stages.join(" → ") || "no stage is done yet"}</small>
      </div>
      <div class="card">
        <span>state</span>
        <b class={`state ${run.state}`}>{run.state}</b>
        <small>{run.state === "running" ? "this page follows it" : duration(run.seconds)}</small>
      </div>
    </div>
  );
}

function Questions({ run, chosen, runs }: { run: Run; chosen: string[]; runs: Run[] }) {
  const other = chosen[1] ?? runs.find((each) => each.name !== run.name)?.name;
  return (
    <nav class="questions" aria-label="Start from a question">
      <span class="quiet">Start from a question</span>
      {run.has_rollouts && (
        <>
          <a href={address("groups", { run: run.name, view: "prompts", unsolved: "1" })}>Which prompts are never solved?</a>
          <a href={address("groups", { run: run.name, view: "prompts", sort: "change" })}>Which got worse?</a>
          <a href={address("groups", { run: run.name, sort: "reward", descending: "1", first_step: Math.max(1, Math.floor((run.steps_done ?? 1) * 0.9)) })}>Is it hacking?</a>
          <a href={address("groups", { run: run.name, state: "broken" })}>Where did graders break?</a>
        </>
      )}
      {other ? (
        <a href={address("compare", { run: run.name, other })}>Is {visible(other)} better?</a>
      ) : (
        <a href={address("compare", { run: run.name })}>What was won, what was lost?</a>
      )}
    </nav>
  );
}

function Diagnosis({ findings, unjudged, several, ready }: { findings: (Finding & { run: string })[]; unjudged: string; several: boolean; ready: boolean }) {
  if (!ready) return null;
  return (
    <section class="diagnosis" aria-label="Diagnosis">
      {findings.length === 0 ? (
        unjudged ? (
          <p class="quiet">Diagnosis: nothing was found wrong, but {unjudged}.</p>
        ) : (
          <p class="fine"><span aria-hidden="true">✓</span> Diagnosis: nothing was found wrong.</p>
        )
      ) : (
        <ul>
          {findings.map((each) => (
            <li key={each.run + each.finding + each.step}>
              <a href={address("groups", { run: each.run, first_step: each.step, last_step: each.step })}>
                <b>{each.finding}</b>
                {several ? ` in ${visible(each.run)}` : ""}, {each.steps}
              </a>
              <span><Coded text={each.text} /></span>
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}

function HeldOut({ charts }: { charts: Charts }) {
  if (!charts.means.length && !charts.notes.length) return null;
  return (
    <section class="panel" aria-label="Held-out rewards">
      <h2>Held-out rewards</h2>
      {charts.means.length > 0 && (
        <div class="scroll" tabIndex={0} role="region" aria-label="Means over held-out problems">
          <table class="numbers">
            <thead>
              <tr>{["mean over held-out problems", "before", "after", "change"].map((text) => <th scope="col" key={text}>{text}</th>)}</tr>
            </thead>
            <tbody>
              {charts.means.map((row) => (
                <tr key={row.label}>
                  <th scope="row">{row.label.replace(/^held-out /, "")}</th>
                  <td class="n">{number(row.before, 3)}</td>
                  <td class="n">{number(row.after, 3)}</td>
                  <td class="n">{row.before === null || row.after === null ? "–" : signed(row.after - row.before)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {charts.notes.map((note) => <p key={note} class="quiet">{note}</p>)}
    </section>
  );
}

function Configuration({ chosen, ways }: { chosen: string[]; ways: Record<string, string> }) {
  const { data } = useData<Settings>(chosen.length ? `settings` : null, { run: chosen.length === 1 ? chosen[0] : undefined, many: chosen.length > 1 ? chosen.join("\n") : undefined });
  if (!data) return null;
  const rows = Object.entries(data.differing);
  return (
    <section class="panel settings" aria-label="Settings">
      <h2>Settings</h2>
      {Object.entries(ways).map(([stage, way]) => <p key={stage} class="quiet">{stage} {way}</p>)}
      {chosen.length > 1 && (rows.length ? <SettingsTable runs={data.runs} rows={rows} caption="In which the runs differ" /> : <p class="quiet">The runs have the same settings.</p>)}
      <details>
        <summary>All settings</summary>
        <SettingsTable runs={data.runs} rows={Object.entries(data.all)} caption="All settings" />
      </details>
    </section>
  );
}

function SettingsTable({ runs, rows, caption }: { runs: string[]; rows: [string, string[]][]; caption: string }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={caption}>
      <table>
        <thead>
          <tr>
            <th scope="col">setting</th>
            {runs.map((run) => <th scope="col" key={run}>{visible(run)}</th>)}
          </tr>
        </thead>
        <tbody>
          {rows.map(([name, values]) => (
            <tr key={name}>
              <th scope="row" class="mono">{name}</th>
              {values.map((value, i) => <td key={i} class="mono">{value}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
