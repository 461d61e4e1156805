import type { Comparison, Run, Side } from "./api";
import { number, percent, visible } from "./format";
import { useData } from "./hooks";
import { Choice, Notice, Pager, Turns } from "./parts";
import { address, go, type Route } from "./route";

const KINDS: [string, string][] = [["won", "Won"], ["lost", "Lost"], ["both", "Right in both"], ["neither", "Wrong in both"], ["broken", "Not graded"]];
const LIMIT = 25;

export function Compare({ route, run, runs }: { route: Route; run: Run; runs: Run[] }) {
  const other = route.params.get("other") ?? "";
  const kind = route.params.get("kind") ?? "";
  const offset = Number(route.params.get("offset") ?? 0);
  const page = useData<Comparison>("compare", { run: run.name, other, kind, offset: offset || undefined, limit: LIMIT }, run.stamp);
  const link = (changes: Record<string, string | number>) => address("compare", { run: run.name, other, kind, ...changes });
  const data = page.data;
  return (
    <>
      <div class="bar">
        <Choice
          label={`${visible(run.name)} against`}
          value={other}
          options={[["", "itself before training"], ...runs.filter((each) => each.name !== run.name).map((each): [string, string] => [each.name, visible(each.name)])]}
          onChange={(value) => go(link({ other: value, kind: "", offset: "" }), true)}
        />
      </div>
      {page.error && <Notice kind="bad">{page.error}</Notice>}
      {data?.missing && <Notice>{data.missing}</Notice>}
      {data && data.problems > 0 && (
        <>
          <section class="panel verdict" aria-label="Verdict">
            <p class="lead">{verdict(data)}</p>
            <div class="intervals">
              {data.shares.map((share, i) => (
                <div key={i} class="interval">
                  <span>{visible(data.names[i]!)}</span>
                  {share.accuracy ? (
                    <>
                      <span class="track" aria-hidden="true">
                        <span class="range" style={{ left: `${100 * share.accuracy[1]!}%`, width: `${100 * (share.accuracy[2]! - share.accuracy[1]!)}%` }} />
                        <span class="point" style={{ left: `${100 * share.accuracy[0]!}%` }} />
                      </span>
                      <b class="n">{percent(share.accuracy[0])}</b>
                      <span class="quiet n">95 %: {percent(share.accuracy[1], 0)} to {percent(share.accuracy[2], 0)}</span>
                    </>
                  ) : (
                    <b class="n">mean reward {number(share.reward, 3)}</b>
                  )}
                </div>
              ))}
            </div>
          </section>
          <nav class="kinds" aria-label="Show problems that were">
            <a href={link({ kind: "", offset: "" })} aria-current={kind === "" ? "true" : undefined}><b class="n">{data.problems}</b> All problems</a>
            {KINDS.filter(([key]) => data.counts[key]).map(([key, text]) => (
              <a key={key} class={key} href={link({ kind: key, offset: "" })} aria-current={kind === key ? "true" : undefined}>
                <b class="n">{data.counts[key]}</b> {text}
              </a>
            ))}
          </nav>
          <div class="scroll panel" tabIndex={0} role="region" aria-label="Problems">
            <table class="compare">
              <thead>
                <tr>
                  <th scope="col">problem</th>
                  <th scope="col">{visible(data.names[0]!)}</th>
                  <th scope="col">{visible(data.names[1]!)}</th>
                </tr>
              </thead>
              <tbody>
                {data.rows.map((row) => (
                  <tr key={row.id} class={row.kind}>
                    <td>
                      <span class="mono said">{visible(row.prompt)}</span>
                      {row.answer && <small class="quiet">expected <span class="mono">{visible(row.answer)}</span></small>}
                    </td>
                    {row.sides.map((side, i) => <td key={i}><Answer side={side} /></td>)}
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
          <Pager offset={offset} limit={LIMIT} total={data.total} what="problems" link={(to) => link({ offset: to })} />
        </>
      )}
    </>
  );
}

function Answer({ side }: { side: Side }) {
  const sign = side.state !== "ok" ? "broken" : side.correct === null ? "" : side.correct ? "right" : "wrong";
  const mark = { right: "✓", wrong: "✗", broken: "?", "": "" }[sign];
  return (
    <>
      {side.turns ? <Turns turns={side.turns} clip={8} /> : <span class="mono said">{visible(side.completion) || <i class="quiet">nothing</i>}</span>}
      <small class={sign || "quiet"}>{mark} {sign || `reward ${number(side.reward, 3)}`}{side.state !== "ok" ? `: ${side.reason}` : ""}</small>
    </>
  );
}

function verdict(data: Comparison): string {
  const { won = 0, lost = 0 } = data.counts;
  const [one, two] = data.names.map(visible);
  const chance = data.sign_test;
  if (won === lost) return `${two} and ${one} are even: ${won} won, ${lost} lost, of ${data.problems} problems.`;
  const itself = one === "before" && two === "after";
  const better = itself ? (won > lost ? "After training it" : "Before training it") : won > lost ? two : one;
  const worse = itself ? (won > lost ? "before" : "after") : won > lost ? one : two;
  const sure = chance !== null && chance < 0.05;
  const odds = chance === null ? "" : chance < 0.001 ? "chance alone does this less than once in 1,000 times" : `chance alone does this ${number(100 * chance, 2)} times in 100`;
  return `${better} ${sure ? "is better than" : "looks better than"} ${worse}: ${won} won, ${lost} lost, of ${data.problems} problems; ${odds}.`;
}
