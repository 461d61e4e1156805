import { useState } from "preact/hooks";
import type { Explanation, RolloutPage, Run } from "./api";
import { number, signed, visible } from "./format";
import { useData } from "./hooks";
import { Diverging, Notice, Reward, Turns } from "./parts";
import type { Route } from "./route";
import { RolloutHead } from "./tokens";

const COLUMNS: [string, string][] = [
  ["reward", "r"],
  ["value", "V"],
  ["advantage", "A"],
  ["old", "log π_old"],
  ["new", "log π"],
  ["ratio", "ρ"],
  ["clip", "clip"],
  ["correction", "c"],
  ["part_policy", "policy"],
  ["part_kl", "β·KL"],
  ["part_entropy", "−c·H"],
  ["part_value", "critic"],
  ["term", "ℓ"],
  ["weight", "w"],
];

export function Explain({ route, run }: { route: Route; run: Run }) {
  const place = { step: Number(route.params.get("step") ?? 1), group: Number(route.params.get("group") ?? 0), sample: Number(route.params.get("sample") ?? 0) };
  const page = useData<Explanation>("explain", { run: run.name, ...place }, run.stamp);
  const rollout = useData<RolloutPage>("rollout", { run: run.name, ...place }, run.stamp);
  const data = page.data;
  return (
    <>
      {rollout.data && <RolloutHead run={run} page={rollout.data} here="explain" />}
      {page.error && <Notice kind="bad">{page.error}</Notice>}
      {data && (
        <>
          <section class="panel algorithm">
            <h2>{data.algorithm}</h2>
            <p>{data.title}</p>
            <pre class="equation">{data.equation}</pre>
            <p class="quiet">{data.reference}</p>
          </section>
          {rollout.data?.rollout.turns ? (
            <div class="exchange">
              <span class="mono">{visible(data.prompt)}</span>
              <Turns turns={rollout.data.rollout.turns} clip={12} />
            </div>
          ) : (
            <p class="exchange">
              <span class="mono">{visible(data.prompt)}</span> <span aria-hidden="true">→</span> <b class="mono">{visible(rollout.data?.rollout.completion ?? "")}</b>
            </p>
          )}
          <ol class="flow">
            {data.parts.map((part) => (
              <li key={part.title} class="panel">
                <h2>{part.title}</h2>
                {part.equation && <p class="equation">{part.equation}</p>}
                <dl>
                  {part.facts.map((fact) => (
                    <div key={fact.label}>
                      <dt>{fact.label}</dt>
                      <dd class="n">{typeof fact.value === "number" ? number(fact.value, 5) : String(fact.value ?? "–")}</dd>
                    </div>
                  ))}
                </dl>
                {part.note && <p class="quiet">{part.note}</p>}
              </li>
            ))}
            <Verdict data={data} />
          </ol>
          <div class={data.siblings.length > 1 ? "pair" : ""}>
            {data.siblings.length > 1 && <Siblings data={data} />}
            <TokenTable data={data} />
          </div>
          <Copy text={data.text} />
        </>
      )}
    </>
  );
}

function Siblings({ data }: { data: Explanation }) {
  const most = Math.max(1e-9, ...data.siblings.map((each) => Math.abs(each.advantage ?? 0)));
  return (
    <section class="panel" aria-label="The group">
    <h2>The group</h2>
    <p class="headings quiet"><span>sample, reward</span><span>advantage</span></p>
    <ul class="ladder">
      {data.siblings.map((each) => (
        <li key={each.sample} class={each.own ? "own" : ""}>
          <span class="n">{each.sample}</span>
          <Reward value={each.reward} state={each.state} />
          <Diverging value={each.advantage} most={most} />
        </li>
      ))}
    </ul>
    </section>
  );
}

function Verdict({ data }: { data: Explanation }) {
  const largest = Math.max(0, ...Object.values(data.differs));
  return (
    <li class={`panel check ${data.agrees ? "good" : "warn"}`}>
      <h2>{data.agrees ? "✓ Agrees with the learner" : "Differs from the learner"}</h2>
      <p>
        All of this was computed again by the library's own pieces. From what the learner recorded it differs by at most <b class="n">{number(largest, 2)}</b>.
        {data.agrees || data.whole ? "" : ` Of this step ${data.recorded} of ${data.sequences} rollouts were recorded, and this algorithm compares with all of them: run.token_numbers keeps more.`}
      </p>
    </li>
  );
}

function TokenTable({ data }: { data: Explanation }) {
  const chosen = data.tokens.filter((token) => token.active);
  const shown = chosen.slice(0, 400);
  const columns = COLUMNS.filter(([key]) => (key === "clip" ? shown.some((t) => t.low || t.high) : shown.some((t) => t[key] !== undefined && t[key] !== null)));
  return (
    <section class="panel" aria-label="Token by token">
      <h2>Token by token</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Numbers of each token">
        <table class="numbers">
          <thead>
            <tr>
              <th scope="col">token</th>
              {columns.map(([key, text]) => <th scope="col" key={key}>{text}</th>)}
            </tr>
          </thead>
          <tbody>
            {shown.map((token, i) => (
              <tr key={i}>
                <th scope="row" class="mono">{visible(token.text).replace(/\n/g, "↵") || "·"}</th>
                {columns.map(([key]) => (
                  <td key={key} class="n">{key === "clip" ? (token.high ? "▲" : token.low ? "▼" : "") : key === "advantage" ? signed(token[key] as number, 4) : number(token[key] as number, 4)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {chosen.length > shown.length && <p class="quiet">Shown are the first {shown.length} of {chosen.length} tokens that the policy chose.</p>}
    </section>
  );
}

function Copy({ text }: { text: string }) {
  const [said, say] = useState("Copy as text");
  const copy = () => {
    const done = navigator.clipboard?.writeText(text);
    (done ?? Promise.reject()).then(
      () => say("Copied"),
      () => say("Select the text below and copy it"),
    );
    setTimeout(() => say("Copy as text"), 3000);
  };
  return (
    <details class="panel copy">
      <summary>The same as text</summary>
      <button type="button" onClick={copy}>{said}</button>
      <pre tabIndex={0}>{visible(text)}</pre>
    </details>
  );
}
