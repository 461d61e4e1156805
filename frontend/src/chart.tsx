// One chart as SVG: curves of one run or several, bounds of estimates, findings on the time axis.
import { useState } from "preact/hooks";
import type { ChartData, Curve, Finding } from "./api";
import { number, percent, visible } from "./format";
import { useWidth } from "./hooks";

export interface Series {
  run: string;
  colour: number; // which of the palette
  dash: number; // which line style
  curve: Curve;
}

interface Props {
  chart: ChartData;
  series: Series[];
  several: boolean; // runs
  findings: Finding[];
  smoothing: number;
  last: number;
  onStep: (step: number) => void;
}

const HEIGHT = 168;
const MARGIN = { top: 10, right: 10, bottom: 22, left: 44 };
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

export function Chart({ chart, series, several, findings, smoothing, last, onStep }: Props) {
  const [ref, width] = useWidth<HTMLDivElement>();
  const [at, setAt] = useState<number | null>(null);
  const inner = Math.max(40, width - MARGIN.left - MARGIN.right);
  const drawn = stackedUp(chart, series.map((each) => ({ ...each, smooth: smoothed(each.curve.values, smoothing) })));
  const [low, high] = range(chart, drawn);
  const first = Math.min(...series.map((each) => each.curve.steps[0] ?? 0));
  const x = (step: number) => MARGIN.left + (inner * (step - first)) / Math.max(1, last - first);
  const y = (value: number) => MARGIN.top + (HEIGHT - MARGIN.top - MARGIN.bottom) * (1 - (value - low) / (high - low || 1));
  const shown = (value: number | null) => (chart.percent ? percent(value) : number(value, 3));
  const stepAt = (event: MouseEvent) => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const place = (event.clientX - box.left - MARGIN.left) / inner;
    return nearest(series[0]!.curve.steps, first + place * (last - first));
  };
  const move = (by: number) => {
    const steps = series[0]!.curve.steps;
    const index = at === null ? steps.length - 1 : steps.indexOf(nearest(steps, at));
    setAt(steps[Math.min(steps.length - 1, Math.max(0, index + by))] ?? null);
  };
  const keyed = (event: KeyboardEvent) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (step) {
      event.preventDefault();
      move(step);
    } else if (event.key === "Enter" && at !== null) onStep(at);
  };
  return (
    <section class="panel chart" aria-label={chart.title}>
      <h2>{chart.title}</h2>
      <ul class="legend">
        {drawn.map((each) => {
          const index = at === null ? each.curve.steps.length - 1 : closest(each.curve.steps, at);
          return (
            <li key={each.run + each.curve.metric}>
              <svg width="18" height="8" aria-hidden="true">
                <line x1="1" x2="17" y1="4" y2="4" class={`curve c${each.colour}`} stroke-dasharray={DASHES[each.dash]} />
              </svg>
              <span>{several ? `${visible(each.run)}${series.some((o) => o.dash) ? `, ${each.curve.label}` : ""}` : each.curve.label}</span>
              <b class="n">{shown(each.curve.values[index] ?? null)}</b>
              {each.curve.of ? (
                <span class="quiet n">
                  {percent(each.curve.low![index], 0)} to {percent(each.curve.high![index], 0)}
                </span>
              ) : null}
            </li>
          );
        })}
        <li class="quiet n">{at === null ? "last" : `step ${at}`}</li>
      </ul>
      <div ref={ref} class="plot">
        {width > 0 && (
          <svg
            width={width}
            height={HEIGHT}
            tabIndex={0}
            role="img"
            aria-label={`${chart.title} over ${last} steps; arrow keys move, Enter opens the step`}
            onMouseMove={(event) => setAt(stepAt(event))}
            onMouseLeave={() => setAt(null)}
            onBlur={() => setAt(null)}
            onClick={(event) => onStep(stepAt(event))}
            onKeyDown={keyed}
          >
            {ticks(low, high, 4).map((value) => (
              <g key={value}>
                <line class="grid" x1={MARGIN.left} x2={width - MARGIN.right} y1={y(value)} y2={y(value)} />
                <text class="tick" x={MARGIN.left - 6} y={y(value) + 4} text-anchor="end">
                  {chart.percent ? `${number(100 * value, 3)}%` : number(value, 3)}
                </text>
              </g>
            ))}
            {ticks(first, last, width > 320 ? 5 : 3).filter(Number.isInteger).map((step) => (
              <text key={step} class="tick" x={x(step)} y={HEIGHT - 6} text-anchor="middle">
                {step}
              </text>
            ))}
            {findings.map((finding) => (
              <g key={finding.finding + finding.step} class="mark">
                <rect x={x(finding.step)} width={Math.max(1, x(finding.until ?? last) - x(finding.step))} y={MARGIN.top} height={HEIGHT - MARGIN.top - MARGIN.bottom} />
                <line x1={x(finding.step)} x2={x(finding.step)} y1={MARGIN.top} y2={HEIGHT - MARGIN.bottom} />
                <title>{`${finding.finding}: ${finding.text.replaceAll("`", "")}`}</title>
              </g>
            ))}
            {drawn.map((each) => (
              <g key={each.run + each.curve.metric}>
                {each.curve.low && <path class={`band c${each.colour}`} d={band(each.curve, x, y)} />}
                {chart.stacked && <path class={`area c${each.colour}`} d={area(each.curve.steps, each.top, each.base, x, y)} />}
                {smoothing > 0 && !chart.stacked && (
                  <path class={`curve faint c${each.colour}`} d={line(each.curve.steps, each.curve.values, x, y)} />
                )}
                {!chart.stacked && (
                  <path class={`curve c${each.colour}`} stroke-dasharray={DASHES[each.dash]} d={line(each.curve.steps, each.smooth, x, y)} />
                )}
                {each.curve.steps.length < 25 &&
                  !chart.stacked &&
                  each.curve.steps.map((step, i) => <circle class={`dot c${each.colour}`} cx={x(step)} cy={y(each.smooth[i]!)} r="2.5" />)}
              </g>
            ))}
            {at !== null && <line class="cursor" x1={x(at)} x2={x(at)} y1={MARGIN.top} y2={HEIGHT - MARGIN.bottom} />}
          </svg>
        )}
      </div>
      <p class="healthy">{chart.healthy}</p>
    </section>
  );
}

type Drawn = Series & { smooth: number[]; base: number[]; top: number[] };

// Of a stacked chart each curve stands on the one before it; else each stands on nothing.
function stackedUp(chart: ChartData, series: (Series & { smooth: number[] })[]): Drawn[] {
  let below: number[] = [];
  return series.map((each) => {
    const base = chart.stacked ? each.smooth.map((_, i) => below[i] ?? 0) : each.smooth.map(() => 0);
    const top = chart.stacked ? each.smooth.map((value, i) => value + base[i]!) : each.smooth;
    below = top;
    return { ...each, base, top };
  });
}

// A debiased exponential moving average, as other tools draw it.
export function smoothed(values: number[], weight: number): number[] {
  if (weight <= 0 || values.length < 25) return values;
  let last = 0;
  return values.map((value, i) => {
    last = last * weight + (1 - weight) * value;
    return last / (1 - weight ** (i + 1));
  });
}

function range(chart: ChartData, drawn: Drawn[]): [number, number] {
  const values = drawn.flatMap((each) => [...each.top, ...middle(each.curve.values), ...(each.curve.low ?? []), ...(each.curve.high ?? [])]);
  const known = values.filter(Number.isFinite);
  let low = Math.min(...known, ...(chart.from_zero ? [0] : []));
  let high = Math.max(...known);
  if (high - low < 1e-9) {
    high += Math.abs(high) * 0.1 || 1;
    low -= chart.from_zero ? 0 : Math.abs(low) * 0.1;
  }
  const room = (high - low) * 0.06;
  return [chart.from_zero || low === 0 ? low : low - room, chart.percent ? Math.min(1, high + room) : high + room];
}

// All but the few most extreme values of a long curve: one spike does not flatten the rest.
function middle(values: number[]): number[] {
  const cut = Math.floor(values.length * 0.02);
  return [...values].sort((a, b) => a - b).slice(cut, values.length - cut);
}

function ticks(low: number, high: number, wanted: number): number[] {
  const raw = (high - low) / wanted || 1;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * size).find((each) => each >= raw) ?? raw;
  const found: number[] = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) {
    found.push(Number(value.toPrecision(12)));
  }
  return found;
}

type Scale = (value: number) => number;

function line(steps: number[], values: number[], x: Scale, y: Scale): string {
  return steps.map((step, i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(values[i]!).toFixed(1)}`).join("");
}

function area(steps: number[], top: number[], base: number[], x: Scale, y: Scale): string {
  if (!steps.length) return "";
  const back = steps.map((step, i) => `L${x(step).toFixed(1)} ${y(base[i]!).toFixed(1)}`).reverse().join("");
  return `${line(steps, top, x, y)}${back}Z`;
}

function band(curve: Curve, x: Scale, y: Scale): string {
  return area(curve.steps, curve.high!, curve.low!, x, y);
}

function closest(steps: number[], at: number): number {
  let best = 0;
  steps.forEach((step, i) => {
    if (Math.abs(step - at) < Math.abs(steps[best]! - at)) best = i;
  });
  return best;
}

function nearest(steps: number[], at: number): number {
  return steps[closest(steps, at)] ?? 0;
}
