// Small parts that several pages share. Text of runs is only ever a text node.
import type { ComponentChildren } from "preact";
import type { TurnRow } from "./api";
import { number, signed, visible } from "./format";

export function Notice({ children, kind = "" }: { children: ComponentChildren; kind?: string }) {
  return (
    <p class={`notice ${kind}`} role="status">
      {children}
    </p>
  );
}

// Text with what stands in backticks as code.
export function Coded({ text }: { text: string }) {
  return <>{text.split("`").map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part))}</>;
}

export function Reward({ value, state = "ok" }: { value: number | null; state?: string }) {
  if (state !== "ok") return <span class="pill broken">{state}</span>;
  const kind = value === null ? "" : value > 0 ? "up" : value < 0 ? "down" : "zero";
  return <span class={`pill n ${kind}`}>{number(value, 3)}</span>;
}

// A bar to the right for what is above 0, to the left for what is below; the number says the same.
export function Diverging({ value, most }: { value: number | null; most: number }) {
  const share = value === null || !most ? 0 : Math.min(1, Math.abs(value) / most);
  const side = (value ?? 0) < 0 ? "left" : "right";
  return (
    <span class="diverging">
      <span class="track" aria-hidden="true">
        <span class={`fill ${side}`} style={{ width: `${50 * share}%` }} />
      </span>
      <span class="n">{signed(value)}</span>
    </span>
  );
}

export function Turns({ turns, clip = 0 }: { turns: TurnRow[]; clip?: number }) {
  const shown = clip && turns.length > clip ? turns.slice(0, clip) : turns;
  return (
    <ol class="turns">
      {shown.map((turn, i) => (
        <li key={i} class={turn.sampled ? "policy" : "environment"}>
          <span class="who">
            {turn.sampled ? "policy" : "environment"}
            {turn.reward ? ` · earned ${signed(turn.reward)}` : ""}
          </span>
          <span class="said">{visible(turn.text.replace(/^\n+|\n+$/g, ""))}</span>
        </li>
      ))}
      {shown.length < turns.length && <li class="quiet">… {turns.length - shown.length} more turns</li>}
    </ol>
  );
}

export function Pager({ offset, limit, total, link, what }: { offset: number; limit: number; total: number; link: (offset: number) => string; what: string }) {
  const last = Math.min(total, offset + limit);
  return (
    <nav class="pager" aria-label="Pages">
      {offset > 0 ? <a href={link(Math.max(0, offset - limit))} rel="prev">← Previous</a> : <span class="off">← Previous</span>}
      <span class="n">
        {total ? `${(offset + 1).toLocaleString("en")} to ${last.toLocaleString("en")} of ${total.toLocaleString("en")} ${what}` : `no ${what}`}
      </span>
      {last < total ? <a href={link(offset + limit)} rel="next">Next →</a> : <span class="off">Next →</span>}
    </nav>
  );
}

export function Choice({ label, value, options, onChange }: { label: string; value: string; options: [string, string][]; onChange: (value: string) => void }) {
  return (
    <label class="field">
      <span>{label}</span>
      <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {options.map(([key, text]) => (
          <option key={key} value={key}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

export function Field({ label, value, onChange, kind = "text", wide = false, id }: { label: string; value: string; onChange: (value: string) => void; kind?: string; wide?: boolean; id?: string }) {
  return (
    <label class={`field ${wide ? "wide" : ""}`}>
      <span>{label}</span>
      <input
        id={id}
        type={kind === "number" ? "text" : kind}
        inputMode={kind === "number" ? "decimal" : undefined}
        value={value}
        onChange={(event) => onChange(event.currentTarget.value.trim())}
        spellcheck={false}
        autocomplete="off"
      />
    </label>
  );
}
