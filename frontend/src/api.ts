// What the server says, or, in a page that is one file, what was written into it.

import { visible } from "./format";

export type Params = Record<string, string | number | undefined>;

interface Embedded {
  answers: Record<string, unknown>;
  written: string;
}

const element = document.getElementById("data");
export const embedded: Embedded | null = element ? JSON.parse(element.textContent ?? "null") : null;

export class Missing extends Error {}

export function query(params: Params): string {
  const pairs = Object.entries(params).filter(([, value]) => value !== undefined && value !== "");
  pairs.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));
  return pairs.map(([k, v]) => `${encodeURIComponent(k)}=${encodeURIComponent(String(v))}`).join("&");
}

export async function get<T>(name: string, params: Params = {}, signal?: AbortSignal): Promise<T> {
  if (embedded) return fromFile<T>(name, params);
  const response = await fetch(`/api/${name}?${query(params)}`, { signal, credentials: "same-origin" });
  const answer = await response.json();
  if (!response.ok) throw new Missing(answer.error ?? `error ${response.status}`);
  return cleaned(answer) as T;
}

// Names that are sent back as they came; every other text is made visible before anyone sees it.
const NAMES = new Set(["name", "names", "run", "runs", "prompt_id", "models"]);

function cleaned(value: unknown, name = ""): unknown {
  if (typeof value === "string") return NAMES.has(name) ? value : visible(value);
  if (Array.isArray(value)) return value.map((each) => cleaned(each, name));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [visible(key), cleaned(each, key)]));
}

function fromFile<T>(name: string, params: Params): Promise<T> {
  const known = embedded!.answers;
  const exact = known[`${name}?${query(params)}`] as { error?: string } | undefined;
  if (exact?.error) return Promise.reject(new Missing(exact.error));
  if (exact !== undefined && name !== "groups") return Promise.resolve(cleaned(exact) as T);
  if (name === "groups") return filtered(known, params) as Promise<T>;
  return Promise.reject(new Missing("This file does not hold that part of the run; posttrain view shows all of it."));
}

// The groups of a file are few: they are filtered here as the server filters all of them.
async function filtered(known: Record<string, unknown>, params: Params): Promise<unknown> {
  const all = cleaned(known["groups?run=" + encodeURIComponent(String(params.run))]) as GroupPage | undefined;
  if (!all) throw new Missing("This file holds no rollouts.");
  const number = (name: string) => (params[name] === undefined || params[name] === "" ? null : Number(params[name]));
  const text = String(params.text ?? "").toLowerCase();
  const passes = (group: Group, m: Member) =>
    (number("first_step") === null || group.step >= number("first_step")!) &&
    (number("last_step") === null || group.step <= number("last_step")!) &&
    (number("group") === null || group.group === number("group")) &&
    (number("min_reward") === null || (m.reward ?? NaN) >= number("min_reward")!) &&
    (number("max_reward") === null || (m.reward ?? NaN) <= number("max_reward")!) &&
    (!params.state || (params.state === "broken" ? m.state !== "ok" : m.state === params.state)) &&
    (!params.stop_reason || m.stop_reason === params.stop_reason) &&
    (!params.prompt_id || group.prompt_id === params.prompt_id) &&
    (!text || `${group.prompt}\n${m.completion}`.toLowerCase().includes(text));
  const found = all.groups.filter((group) => group.members.some((m) => passes(group, m)));
  const key = params.sort as "reward" | "spread" | "length" | undefined;
  if (key && key in (found[0] ?? {})) {
    found.sort((a, b) => (a[key] ?? Infinity) - (b[key] ?? Infinity));
  }
  if (params.descending === "1") found.reverse();
  const offset = number("offset") ?? 0;
  return { ...all, groups: found.slice(offset, offset + (number("limit") ?? 20)), offset, total: found.length };
}

export interface Run {
  name: string;
  state: "finished" | "running" | "unfinished" | "broken";
  stages: string[];
  algorithm: string | null;
  steps_done: number | null;
  steps: number | null;
  reward_first: number | null;
  reward_last: number | null;
  reward_steps: number | null;
  seconds: number | null;
  findings: number;
  problem: string;
  has_rollouts: boolean;
  stamp: number;
}

export interface Curve {
  metric: string;
  label: string;
  steps: number[];
  values: number[];
  averaged: number;
  low?: number[];
  high?: number[];
  of?: number;
}

export interface ChartData {
  key: string;
  title: string;
  healthy: string;
  percent: boolean;
  stacked: boolean;
  from_zero: boolean;
  curves: Curve[];
}

export interface Finding {
  finding: string;
  step: number;
  until: number | null;
  steps: string;
  text: string;
}

export interface Charts {
  run: string;
  stage: string;
  stages: string[];
  charts: ChartData[];
  findings: Finding[];
  unjudged: string;
  last_step: number;
  steps: number | null;
  results: { label: string; note: string; before: number[] | null; after: number[] | null }[];
  means: { label: string; before: number | null; after: number | null }[];
  notes: string[];
  ways: Record<string, string>;
}

export interface TurnRow {
  start: number;
  length: number;
  sampled: boolean;
  text: string;
  reward: number | null;
}

export interface Member {
  step: number;
  group: number;
  sample: number;
  completion: string;
  reward: number | null;
  state: string;
  reason: string;
  parts: Record<string, number | null>;
  advantage: number | null;
  version: number;
  stop_reason: string;
  length: number;
  turns: TurnRow[] | null;
}

export interface Group {
  step: number;
  group: number;
  prompt_id: string;
  prompt: string;
  size: number;
  reward: number | null;
  spread: number | null;
  length: number | null;
  members: Member[];
}

export interface GroupPage {
  groups: Group[];
  offset: number;
  total: number;
  rollouts: number;
  steps: number[];
  problems: Record<string, string>;
}

export interface PromptRow {
  prompt_id: string;
  prompt: string;
  best: number | null;
  mean: number | null;
  change: number | null;
  times: number;
  last_step: number;
}

export interface PromptPage {
  prompts: PromptRow[];
  offset: number;
  total: number;
  highest: number;
}

export interface RolloutPage {
  step: number;
  group: number;
  sample: number;
  prompt_id: string;
  rollout: Member;
  prompt: { text: string; tokens: number[]; texts: string[]; special: boolean[] };
  tokens: number[];
  texts: string[];
  active: boolean[];
  special: boolean[];
  columns: Record<string, (number | null)[]>;
  offset: number;
  total: number;
  split: boolean;
  optimiser_step: number | null;
  siblings: { sample: number; reward: number | null; state: string }[];
}

export interface Fact {
  label: string;
  value: number | string | null;
}

export interface Explanation {
  algorithm: string;
  title: string;
  equation: string;
  reference: string;
  parts: { title: string; equation: string; facts: Fact[]; note: string }[];
  siblings: { sample: number; reward: number | null; state: string; paid: number | null; advantage: number | null; own: boolean }[];
  tokens: ({ text: string; active: boolean } & Record<string, number | string | boolean | null>)[];
  differs: Record<string, number>;
  agrees: boolean;
  whole: boolean;
  sequences: number;
  recorded: number;
  text: string;
  prompt: string;
}

export interface Side {
  completion: string;
  turns: TurnRow[] | null;
  reward: number | null;
  correct: boolean | null;
  state: string;
  reason: string;
}

export interface Comparison {
  names: string[];
  total: number;
  offset: number;
  problems: number;
  counts: Record<string, number>;
  rows: { id: string; kind: string; prompt: string; answer: string; sides: Side[] }[];
  missing: string;
  shares: { accuracy: number[] | null; reward: number | null; of: number }[];
  sign_test: number | null;
}

export interface Settings {
  runs: string[];
  differing: Record<string, string[]>;
  all: Record<string, string[]>;
}

export interface StepPage {
  step: number;
  over: number;
  reward: { value: number; before: number; moved: number } | null;
  rows: { metric: string; value: number; before: number; moved: number }[];
  findings: Finding[];
}
