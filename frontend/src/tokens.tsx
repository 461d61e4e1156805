// One rollout as text; each token is coloured by a number of its own, and all of them are a hover away.
import { useEffect, useMemo, useState } from "preact/hooks";
import type { RolloutPage, Run } from "./api";
import { number, signed, visible } from "./format";
import { useData, useKeys } from "./hooks";
import { Notice, Reward } from "./parts";
import { address, go, type Route } from "./route";

interface Measure {
  key: string;
  label: string;
  says: string; // what the colours mean, in a line
  diverging: boolean;
  of: (page: RolloutPage, i: number) => number | null;
}

const column = (page: RolloutPage, name: string, i: number) => page.columns[name]?.[i] ?? null;
const chosen = (page: RolloutPage, i: number) => column(page, "logprobs", i) ?? column(page, "sampler", i);
const less = (a: number | null, b: number | null) => (a === null || b === null ? null : a - b);

export const MEASURES: Measure[] = [
  { key: "logprob", label: "Log-prob", says: "the less likely a token was, the stronger its colour", diverging: false, of: (p, i) => negated(chosen(p, i)) },
  { key: "ratio", label: "Ratio", says: "log ρ: orange became likelier in this update, blue less likely", diverging: true, of: (p, i) => less(column(p, "logprobs", i), column(p, "old_logprobs", i)) },
  { key: "advantage", label: "Advantage", says: "orange is pushed up, blue is pushed down", diverging: true, of: (p, i) => column(p, "advantages", i) },
  { key: "kl", label: "KL", says: "log π − log π_ref: orange is likelier than in the reference, blue less likely", diverging: true, of: (p, i) => less(column(p, "old_logprobs", i), column(p, "ref_logprobs", i)) },
  { key: "entropy", label: "Entropy", says: "the more undecided the policy was here, the stronger the colour", diverging: false, of: (p, i) => column(p, "entropy", i) },
  { key: "clip", label: "Clip", says: "▲ stopped above the bound, ▼ stopped below it: no gradient", diverging: true, of: (p, i) => less(column(p, "clip_high", i), column(p, "clip_low", i)) },
  { key: "term", label: "Loss term", says: "blue lowers the loss, orange raises it", diverging: true, of: (p, i) => column(p, "loss", i) },
];

const NUMBERS: [string, string][] = [
  ["sampler", "log π of the sampler"],
  ["old_logprobs", "log π_old"],
  ["logprobs", "log π in the update"],
  ["ref_logprobs", "log π_ref"],
  ["teacher_logprobs", "log π_teacher"],
  ["entropy", "entropy, nats"],
  ["advantages", "advantage"],
  ["values", "critic before"],
  ["new_values", "critic in the update"],
  ["divergence", "divergence from the teacher"],
  ["loss", "loss term ℓ"],
  ["weights", "weight w"],
];

export function Tokens({ route, run }: { route: Route; run: Run }) {
  const place = { step: Number(route.params.get("step") ?? 1), group: Number(route.params.get("group") ?? 0), sample: Number(route.params.get("sample") ?? 0) };
  const offset = Number(route.params.get("offset") ?? 0);
  const page = useData<RolloutPage>("rollout", { run: run.name, ...place, offset: offset || undefined }, run.stamp);
  const available = useMemo(() => MEASURES.filter((each) => page.data && page.data.tokens.some((_, i) => each.of(page.data!, i) !== null)), [page.data]);
  const wanted = route.params.get("colour") ?? "logprob";
  const measure = available.find((each) => each.key === wanted) ?? available[0] ?? MEASURES[0]!;
  const [at, setAt] = useState<number | null>(null);
  useEffect(() => setAt(null), [run.name, place.step, place.group, place.sample, offset]);
  const move = (by: number) => {
    if (!page.data) return;
    const next = Math.min(page.data.tokens.length - 1, Math.max(0, (at ?? (by > 0 ? -1 : 1)) + by));
    setAt(next);
    document.getElementById(`token-${next}`)?.scrollIntoView({ block: "nearest" });
  };
  const sibling = (by: number) => {
    const all = page.data?.siblings ?? [];
    const index = all.findIndex((each) => each.sample === place.sample) + by;
    if (all[index]) go(address("tokens", { run: run.name, ...place, sample: all[index].sample, colour: wanted }), true);
  };
  useKeys({ ArrowRight: () => move(1), ArrowLeft: () => move(-1), "]": () => sibling(1), "[": () => sibling(-1), Escape: () => setAt(null) });
  if (page.error) return <Notice kind="bad">{page.error}</Notice>;
  if (!page.data) return null;
  const data = page.data;
  const link = (changes: Record<string, string | number>) => address("tokens", { run: run.name, ...place, colour: measure.key, ...changes });
  return (
    <>
      <RolloutHead run={run} page={data} here="tokens" colour={measure.key} />
      <div class="bar">
        <div class="switch" role="group" aria-label="Colour by">
          {MEASURES.map((each) =>
            available.includes(each) ? (
              <a key={each.key} href={link({ colour: each.key })} aria-current={each.key === measure.key ? "true" : undefined}>{each.label}</a>
            ) : (
              <span key={each.key} class="off" title="not recorded, or not part of this algorithm">{each.label}</span>
            ),
          )}
        </div>
        <Scale page={data} measure={measure} />
      </div>
      {!data.split && <Notice>This run folder has no tokenizer, so the text cannot be parted into its tokens.</Notice>}
      <NotLearned page={data} />
      <div class="reading">
        <div class="panel text" aria-label="Rollout, token by token">
          <Turn who="prompt">{data.prompt.texts.length ? <Plain texts={data.prompt.texts} special={data.prompt.special} /> : visible(data.prompt.text)}</Turn>
          {turnsOf(data).map((turn, i) => (
            <Turn key={i} who={turn.sampled ? "policy" : "environment"} reward={turn.reward} number={turn.number}>
              {data.tokens.slice(turn.from, turn.to).map((_, k) => (
                <Token key={turn.from + k} page={data} i={turn.from + k} measure={measure} on={at === turn.from + k} onAt={setAt} />
              ))}
            </Turn>
          ))}
          {data.total > data.tokens.length && (
            <nav class="pager" aria-label="Parts of the rollout">
              {offset > 0 && <a href={link({ offset: Math.max(0, offset - 4000) })}>← Earlier tokens</a>}
              <span class="n">tokens {offset + 1} to {offset + data.tokens.length} of {data.total}</span>
              {offset + data.tokens.length < data.total && <a href={link({ offset: offset + 4000 })}>Later tokens →</a>}
            </nav>
          )}
        </div>
        <Numbers page={data} at={at} />
      </div>
    </>
  );
}

// Why no token of a rollout counts, where none does.
function NotLearned({ page }: { page: RolloutPage }) {
  const { state, reason } = page.rollout;
  if (state !== "ok") return <Notice kind="warn">Its score broke ({state}{reason ? `: ${visible(reason)}` : ""}): none of its tokens is learned from.</Notice>;
  const weights = page.columns.weights;
  if (weights && weights.every((each) => !each)) return <Notice>None of these tokens counts in the loss: their weights are 0, as where all advantages are 0, or the answer was left out.</Notice>;
  return null;
}

export function RolloutHead({ run, page, here, colour }: { run: Run; page: Pick<RolloutPage, "step" | "group" | "sample" | "siblings" | "prompt_id" | "rollout">; here: "tokens" | "explain"; colour?: string }) {
  const place = { run: run.name, step: page.step, group: page.group };
  const own = { ...place, sample: page.sample };
  return (
    <header class="rollouthead">
      <h1>
        <a href={address("groups", { run: run.name, first_step: page.step, last_step: page.step, group: page.group })}>Step {page.step}, group {page.group}</a>, sample {page.sample}
      </h1>
      <p>
        <span>reward <Reward value={page.rollout.reward} state={page.rollout.state} /></span>
        <span>advantage <b class="n">{signed(page.rollout.advantage)}</b></span>
        <span>{page.rollout.length} tokens</span>
        <span>{page.rollout.stop_reason === "stop" ? "ended by itself" : page.rollout.stop_reason.replace("_", " ")}</span>
        {Object.entries(page.rollout.parts).length > 1 && Object.entries(page.rollout.parts).map(([name, value]) => <span key={name}>{name} <b class="n">{number(value, 3)}</b></span>)}
        {here === "tokens" ? <a href={address("explain", own)}>Explain its arithmetic</a> : <a href={address("tokens", own)}>Read its tokens</a>}
        <a href={address("groups", { run: run.name, prompt_id: page.prompt_id })}>Follow this prompt</a>
      </p>
      <nav class="samples" aria-label="Completions of the same prompt">
        {page.siblings.slice(0, 64).map((each) => (
          <a key={each.sample} href={address(here, { ...place, sample: each.sample, colour })} aria-current={each.sample === page.sample ? "true" : undefined} aria-label={`Sample ${each.sample}, reward ${number(each.reward, 3)}`}>
            <Reward value={each.reward} state={each.state} />
          </a>
        ))}
      </nav>
    </header>
  );
}

function Turn({ who, reward, number: place, children }: { who: string; reward?: number | null; number?: number; children: preact.ComponentChildren }) {
  const masked = who !== "policy";
  return (
    <div class={`turn ${who}`}>
      <div class="who">
        {who}{place ? `, turn ${place}` : ""}
        {reward ? ` · earned ${signed(reward)}` : ""}
        {masked && <span class="quiet"> · read, not learned</span>}
      </div>
      <div class="body">{children}</div>
    </div>
  );
}

function Plain({ texts, special }: { texts: string[]; special: boolean[] }) {
  return (
    <>
      {texts.map((text, i) => <span key={i} class={special[i] ? "token special" : "token"}>{shownText(text)}</span>)}
    </>
  );
}

function Token({ page, i, measure, on, onAt }: { page: RolloutPage; i: number; measure: Measure; on: boolean; onAt: (i: number) => void }) {
  const active = page.active[i]!;
  const value = active ? measure.of(page, i) : null;
  const kind = `token${page.special[i] ? " special" : ""}${active ? " active" : " masked"}${on ? " on" : ""}`;
  const stopped = measure.key === "clip" && value ? (value > 0 ? "▲" : "▼") : "";
  return (
    <span id={`token-${i}`} class={kind} style={{ background: colourOf(value, page, measure) }} onMouseEnter={() => onAt(i)} onClick={() => onAt(i)}>
      {stopped && <sup>{stopped}</sup>}
      {shownText(page.texts[i] ?? "")}
    </span>
  );
}

// A line break is a sign and a break; a token without a text of its own (a part of a character) is a dot.
function shownText(text: string) {
  if (text === "") return "·";
  const parts = visible(text).split("\n");
  return parts.flatMap((part, i) => (i ? ["↵", <br key={i} />, part] : [part]));
}

const scales = new WeakMap<RolloutPage, Map<string, number>>();

// The strongest colour is for the 98th of 100 values: one outlier does not pale all others.
function strongest(page: RolloutPage, measure: Measure): number {
  const known = scales.get(page) ?? new Map<string, number>();
  scales.set(page, known);
  if (!known.has(measure.key)) {
    const sizes = page.tokens.flatMap((_, i) => measure.of(page, i) ?? []).map(Math.abs).sort((a, b) => a - b);
    known.set(measure.key, sizes[Math.ceil(0.98 * (sizes.length - 1))] || sizes.at(-1) || 0);
  }
  return known.get(measure.key)!;
}

function colourOf(value: number | null, page: RolloutPage, measure: Measure): string {
  const most = strongest(page, measure);
  if (value === null || !most) return "transparent";
  const share = Math.round(58 * Math.min(1, Math.abs(value) / most));
  return share < 1 ? "transparent" : `color-mix(in srgb, var(${value > 0 && measure.diverging ? "--high" : "--low"}) ${share}%, transparent)`;
}

function Scale({ page, measure }: { page: RolloutPage; measure: Measure }) {
  const most = strongest(page, measure);
  return (
    <div class="scale">
      {measure.key !== "clip" && (
        <>
          <span class="n">{measure.diverging ? signed(-most) : "0"}</span>
          <span class={`ramp ${measure.diverging ? "two" : "one"}`} aria-hidden="true" />
          <span class="n">{measure.diverging ? signed(most) : number(measure.key === "logprob" ? -most : most, 3)}</span>
        </>
      )}
      <span class="quiet">{measure.says}</span>
    </div>
  );
}

function Numbers({ page, at }: { page: RolloutPage; at: number | null }) {
  if (at === null || page.tokens[at] === undefined) {
    return (
      <aside class="panel numbers">
        <h2>A token</h2>
        <p class="quiet">Point at a token, or walk with ← and →, to see every number that it got. [ and ] go to the other completions.</p>
        <p class="quiet">Dotted tokens are the environment's: they are read and not learned. Framed ones are special tokens.</p>
      </aside>
    );
  }
  const known = NUMBERS.filter(([name]) => page.columns[name]);
  const ratio = less(column(page, "logprobs", at), column(page, "old_logprobs", at));
  const reference = less(column(page, "old_logprobs", at), column(page, "ref_logprobs", at));
  const probability = chosen(page, at);
  const stopped = column(page, "clip_high", at) ? "above" : column(page, "clip_low", at) ? "below" : "no";
  const weight = column(page, "weights", at);
  const term = column(page, "loss", at);
  return (
    <aside class="panel numbers" aria-live="polite">
      <h2>Token {page.offset + at + 1} <span class="quiet n">id {page.tokens[at]}</span></h2>
      <p class="big mono">{shownText(page.texts[at] ?? "")}</p>
      {page.active[at] ? (
        <dl>
          {probability !== null && <Row name="probability" value={number(Math.exp(probability), 4)} />}
          {known.map(([name, label]) => <Row key={name} name={label} value={number(column(page, name, at), 5)} />)}
          {ratio !== null && <Row name="ratio ρ" value={number(Math.exp(ratio), 5)} />}
          {reference !== null && <Row name="log π_old − log π_ref" value={signed(reference, 4)} />}
          {page.columns.clip_low && <Row name="stopped by the clip" value={stopped} />}
          {weight !== null && term !== null && <Row name="w · ℓ, its part of the loss" value={number(weight * term, 4)} />}
        </dl>
      ) : (
        <p>The environment wrote this token: it is read, and has no part in the loss.</p>
      )}
    </aside>
  );
}

function Row({ name, value }: { name: string; value: string }) {
  return (
    <>
      <dt>{name}</dt>
      <dd class="n">{value}</dd>
    </>
  );
}

interface Part {
  from: number;
  to: number;
  sampled: boolean;
  reward: number | null;
  number: number;
}

// The turns of the tokens on this page; a rollout without several is one turn of the policy.
function turnsOf(page: RolloutPage): Part[] {
  const turns = page.rollout.turns ?? [{ start: 0, length: page.total, sampled: true, text: "", reward: null }];
  let count = 0;
  return turns
    .map((turn) => {
      count += turn.sampled ? 1 : 0;
      const from = Math.max(0, turn.start - page.offset);
      const to = Math.min(page.tokens.length, turn.start + turn.length - page.offset);
      return { from, to, sampled: turn.sampled, reward: turn.reward, number: turns.length > 1 && turn.sampled ? count : 0 };
    })
    .filter((part) => part.to > part.from);
}

function negated(value: number | null): number | null {
  return value === null ? null : -value;
}
