import type { Group, GroupPage, Member, PromptPage, Run, StepPage } from "./api";
import { count, number, signed, visible } from "./format";
import { useData, useKeys } from "./hooks";
import { Choice, Coded, Diverging, Field, Notice, Pager, Reward, Turns } from "./parts";
import { address, go, type Route } from "./route";

const LIMIT = 10;
const FILTERS = ["first_step", "last_step", "min_reward", "max_reward", "state", "stop_reason", "text", "prompt_id", "group"];
const SORTS: [string, string][] = [
  ["step", "step"],
  ["reward", "mean reward"],
  ["spread", "spread of rewards"],
  ["length", "length"],
  ["advantage", "size of advantages"],
];
const STATES: [string, string][] = [["", "any"], ["ok", "scored"], ["broken", "grader broke"], ["timeout", "timeout"], ["crashed", "crashed"], ["invalid", "invalid"]];
const STOPS: [string, string][] = [["", "any"], ["stop", "by itself"], ["length", "cut at the limit"], ["stop_string", "stop string"], ["max_turns", "limit of turns"], ["max_tokens", "limit of tokens"]];

const ENDS: Record<string, string> = { length: "cut", stop_string: "stop string", max_turns: "limit of turns", max_tokens: "limit of tokens" };

export function Groups({ route, run }: { route: Route; run: Run }) {
  return route.params.get("view") === "prompts" ? <Prompts route={route} run={run} /> : <ByStep route={route} run={run} />;
}

function Views({ run, prompts }: { run: Run; prompts: boolean }) {
  return (
    <div class="switch" role="group" aria-label="View">
      <a href={address("groups", { run: run.name })} aria-current={prompts ? undefined : "true"}>By step</a>
      <a href={address("groups", { run: run.name, view: "prompts" })} aria-current={prompts ? "true" : undefined}>By prompt</a>
    </div>
  );
}

function ByStep({ route, run }: { route: Route; run: Run }) {
  const asked = (name: string) => route.params.get(name) ?? "";
  const given = Object.fromEntries([...FILTERS, "sort", "descending", "offset"].map((name) => [name, asked(name)]));
  const link = (changes: Record<string, string | number>) => address("groups", { run: run.name, ...given, offset: "", ...changes });
  const set = (changes: Record<string, string>) => go(link(changes), true);
  const page = useData<GroupPage>("groups", { run: run.name, limit: LIMIT, ...given }, run.stamp);
  const single = asked("first_step") !== "" && asked("first_step") === asked("last_step") ? Number(asked("first_step")) : null;
  const step = useData<StepPage>(single === null ? null : "step", { run: run.name, step: single ?? 0 }, run.stamp);
  const offset = Number(asked("offset") || 0);
  const turn = (by: number) => {
    if (single !== null) set({ first_step: String(Math.max(1, single + by)), last_step: String(Math.max(1, single + by)) });
  };
  useKeys({
    "/": () => document.getElementById("search")?.focus(),
    n: () => page.data && offset + LIMIT < page.data.total && go(link({ offset: offset + LIMIT })),
    p: () => offset > 0 && go(link({ offset: Math.max(0, offset - LIMIT) })),
    "]": () => turn(1),
    "[": () => turn(-1),
  });
  const active = FILTERS.filter((name) => asked(name) !== "");
  return (
    <>
      <div class="bar">
        <Views run={run} prompts={false} />
        <Field label="Step from" kind="number" value={asked("first_step")} onChange={(value) => set({ first_step: value })} />
        <Field label="to" kind="number" value={asked("last_step")} onChange={(value) => set({ last_step: value })} />
        <Field label="Reward from" kind="number" value={asked("min_reward")} onChange={(value) => set({ min_reward: value })} />
        <Field label="to" kind="number" value={asked("max_reward")} onChange={(value) => set({ max_reward: value })} />
        <Choice label="Score" value={asked("state")} options={STATES} onChange={(value) => set({ state: value })} />
        <Choice label="Ended" value={asked("stop_reason")} options={STOPS} onChange={(value) => set({ stop_reason: value })} />
        <Field id="search" label="Text in prompt or answer" kind="search" wide value={asked("text")} onChange={(value) => set({ text: value })} />
        <Choice label="Order by" value={asked("sort") || "step"} options={SORTS} onChange={(value) => set({ sort: value })} />
        <Choice label="Direction" value={asked("descending")} options={[["", "rising"], ["1", "falling"]]} onChange={(value) => set({ descending: value })} />
        {active.length > 0 && <a class="clear" href={address("groups", { run: run.name })}>Clear filters</a>}
      </div>
      {asked("prompt_id") && page.data && <Followed page={page.data} prompt={asked("prompt_id")} />}
      {step.data && <StepSummary step={step.data} onTurn={turn} />}
      {page.error && <Notice kind="bad">{page.error}</Notice>}
      {page.data && Object.entries(page.data.problems).map(([file, why]) => <Notice key={file} kind="bad">{file} cannot be read: {why}</Notice>)}
      <div class={page.loading ? "busy" : ""} aria-busy={page.loading}>
        {page.data?.groups.map((group) => <GroupCard key={`${group.step}-${group.group}`} group={group} run={run.name} />)}
      </div>
      {page.data && <Pager offset={offset} limit={LIMIT} total={page.data.total} what="groups" link={(to) => link({ offset: to })} />}
      {page.data && <p class="quiet">A group is shown whole where one of its answers passes the filter. {count(page.data.rollouts)} rollouts in this run.</p>}
    </>
  );
}

function StepSummary({ step, onTurn }: { step: StepPage; onTurn: (by: number) => void }) {
  return (
    <section class="panel step" aria-label={`Step ${step.step}`}>
      <h2>
        <button type="button" class="plain" onClick={() => onTurn(-1)} aria-label="Step before">‹</button> Step {step.step}{" "}
        <button type="button" class="plain" onClick={() => onTurn(1)} aria-label="Step after">›</button>
      </h2>
      {step.reward && (
        <p>
          Reward <b class="n">{number(step.reward.value, 3)}</b>, over the {step.over} steps before <b class="n">{number(step.reward.before, 3)}</b>: {moved(step.reward.moved)}.
          {step.rows.length > 0 && " What moved most with it, in deviations of those steps:"}
        </p>
      )}
      {!step.reward && step.rows.length === 0 && <p class="quiet">There are too few steps before it to compare with.</p>}
      <ul class="moved">
        {step.rows.map((row) => (
          <li key={row.metric}>
            <span class="mono">{row.metric}</span> <span class="n">{number(row.before, 3)} → <b>{number(row.value, 3)}</b></span>
            <span class="quiet n">{signed(row.moved, 2)}</span>
          </li>
        ))}
      </ul>
      {step.findings.map((each) => <Notice key={each.finding} kind="warn"><b>{each.finding}</b>: <Coded text={each.text} /></Notice>)}
    </section>
  );
}

function moved(deviations: number): string {
  const size = Math.abs(deviations);
  const way = deviations < 0 ? "lower" : "higher";
  if (size < 1) return "within the usual noise";
  return `${size < 2 ? "a little" : size < 4 ? "clearly" : "far"} ${way} (${signed(deviations, 2)} deviations)`;
}

// One prompt through training: a bar for each time that it was asked.
function Followed({ page, prompt }: { page: GroupPage; prompt: string }) {
  const groups = page.groups;
  if (!groups.length) return null;
  const rewards = groups.flatMap((each) => each.reward ?? []);
  const lowest = Math.min(0, ...rewards);
  const span = Math.max(1e-9, Math.max(0, ...rewards) - lowest);
  return (
    <section class="panel" aria-label="One prompt through training">
      <h2>One prompt through training: <span class="mono">{visible(prompt)}</span></h2>
      <p class="quiet">Asked {page.total} times; this page has {groups.length} of them. Mean reward each time:</p>
      <ol class="strip">
        {groups.map((each) => (
          <li key={each.step}>
            <span class="column" aria-hidden="true"><span style={{ height: `${Math.max(2, Math.round((100 * ((each.reward ?? lowest) - lowest)) / span))}%` }} /></span>
            <span class="n">{number(each.reward, 2)}</span>
            <span class="quiet n">step {each.step}</span>
          </li>
        ))}
      </ol>
    </section>
  );
}

function GroupCard({ group, run }: { group: Group; run: string }) {
  const most = Math.max(1e-9, ...group.members.map((each) => Math.abs(each.advantage ?? 0)));
  const signal = (group.spread ?? 0) > 0;
  return (
    <article class="panel group">
      <header>
        <a class="n" href={address("groups", { run, first_step: group.step, last_step: group.step })}>Step {group.step}</a>
        <span class="quiet n">group {group.group}</span>
        <span class="n">mean reward {number(group.reward, 3)}</span>
        <span class={signal ? "n" : "quiet"}>{signal ? `deviation ${number(group.spread, 2)}` : "all alike: no signal"}</span>
        <a class="follow" href={address("groups", { run, prompt_id: group.prompt_id })}>Follow this prompt</a>
      </header>
      <p class="asked mono">{visible(group.prompt)}</p>
      <ul class={`siblings ${sizeOf(group)}`}>
        {group.members.map((each) => <Sibling key={each.sample} member={each} run={run} most={most} />)}
      </ul>
      {group.size > group.members.length && <p class="quiet">… and {group.size - group.members.length} more completions</p>}
    </article>
  );
}

// Short answers stand eight abreast, long ones have room to be read.
function sizeOf(group: Group): string {
  const longest = Math.max(0, ...group.members.map((each) => (each.turns ? 60 : each.completion.length)));
  return longest <= 24 ? "small" : longest <= 160 ? "" : "large";
}

function Sibling({ member, run, most }: { member: Member; run: string; most: number }) {
  const place = { run, step: member.step, group: member.group, sample: member.sample };
  const parts = Object.entries(member.parts);
  return (
    <li>
      <div class="top">
        <Reward value={member.reward} state={member.state} />
        <Diverging value={member.advantage} most={most} />
      </div>
      {member.turns ? <Turns turns={member.turns} clip={8} /> : <p class="said mono">{visible(member.completion) || <i class="quiet">nothing</i>}</p>}
      {member.state !== "ok" && <p class="why">{member.reason}</p>}
      {parts.length > 1 && (
        <ul class="parts">
          {parts.map(([name, value]) => <li key={name}><span>{name}</span> <b class="n">{number(value, 3)}</b></li>)}
        </ul>
      )}
      <footer>
        <span class="quiet n" title={member.stop_reason === "stop" ? "ended by itself" : undefined}>{member.length} tok</span>
        {member.stop_reason !== "stop" && <span class="flag">{ENDS[member.stop_reason] ?? member.stop_reason}</span>}
        <a href={address("tokens", place)}>Tokens</a>
        <a href={address("explain", place)}>Explain</a>
      </footer>
    </li>
  );
}

function Prompts({ route, run }: { route: Route; run: Run }) {
  const asked = (name: string) => route.params.get(name) ?? "";
  const given = { sort: asked("sort") || "best", descending: asked("descending"), unsolved: asked("unsolved"), offset: asked("offset") };
  const link = (changes: Record<string, string | number>) => address("groups", { run: run.name, view: "prompts", ...given, offset: "", ...changes });
  const page = useData<PromptPage>("prompts", { run: run.name, limit: 50, ...given }, run.stamp);
  const heading = (key: string, text: string) => {
    const on = given.sort === key;
    return (
      <th scope="col" aria-sort={on ? (given.descending ? "descending" : "ascending") : undefined}>
        <a href={link({ sort: key, descending: on && !given.descending ? "1" : "" })}>{text}{on ? (given.descending ? " ↓" : " ↑") : ""}</a>
      </th>
    );
  };
  return (
    <>
      <div class="bar">
        <Views run={run} prompts />
        <Choice label="Show" value={given.unsolved} options={[["", "all prompts"], ["1", "those never solved"]]} onChange={(value) => go(link({ unsolved: value }), true)} />
      </div>
      {page.error && <Notice kind="bad">{page.error}</Notice>}
      {page.data && given.unsolved && (
        <p>{page.data.total === 0 ? "Every prompt was solved at least once." : `${count(page.data.total)} prompts never reached the highest reward of this run, ${number(page.data.highest, 3)}.`}</p>
      )}
      {page.data && page.data.prompts.length > 0 && (
        <div class="scroll panel" tabIndex={0} role="region" aria-label="Prompts">
          <table class="prompts">
            <thead>
              <tr>
                <th scope="col">prompt</th>
                {heading("best", "best reward")}
                {heading("mean", "mean")}
                {heading("change", "later − earlier")}
                {heading("times", "answers")}
                {heading("last_step", "last step")}
              </tr>
            </thead>
            <tbody>
              {page.data.prompts.map((each) => (
                <tr key={each.prompt_id}>
                  <td><a class="mono" href={address("groups", { run: run.name, prompt_id: each.prompt_id })}>{visible(each.prompt.slice(0, 200)) || visible(each.prompt_id)}</a></td>
                  <td class="n">{number(each.best, 3)}</td>
                  <td class="n">{number(each.mean, 3)}</td>
                  <td class="n">{signed(each.change)}</td>
                  <td class="n">{count(each.times)}</td>
                  <td class="n">{each.last_step}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {page.data && <Pager offset={Number(given.offset || 0)} limit={50} total={page.data.total} what="prompts" link={(to) => link({ offset: to })} />}
    </>
  );
}
