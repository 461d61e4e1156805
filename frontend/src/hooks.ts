import { useEffect, useRef, useState } from "preact/hooks";
import { embedded, get, Missing, type Params, query, type Run } from "./api";

export interface Loaded<T> {
  data: T | null;
  error: string;
  loading: boolean;
}

// What an address answers; it is asked again when `stamp` changes, and shown until the answer is there.
export function useData<T>(name: string | null, params: Params, stamp: unknown = 0): Loaded<T> {
  const [state, set] = useState<Loaded<T>>({ data: null, error: "", loading: true });
  const key = name === null ? "" : `${name}?${query(params)}`;
  useEffect(() => {
    if (name === null) {
      set({ data: null, error: "", loading: false });
      return;
    }
    const asked = new AbortController();
    set((old) => ({ ...old, loading: true }));
    get<T>(name, params, asked.signal).then(
      (data) => set({ data, error: "", loading: false }),
      (error: Error) => {
        if (error.name === "AbortError") return;
        const text = error instanceof Missing ? error.message : `The server does not answer (${error.message}).`;
        set({ data: null, error: text, loading: false });
      },
    );
    return () => asked.abort();
  }, [key, stamp]);
  return state;
}

// The runs, looked at every two seconds while the page is visible: what has changed has another stamp.
export function useRuns(): { runs: Run[]; leftOut: number; error: string; ready: boolean } {
  const [state, set] = useState<{ runs: Run[]; leftOut: number; error: string; ready: boolean }>({ runs: [], leftOut: 0, error: "", ready: false });
  useEffect(() => {
    let stopped = false;
    let timer = 0;
    const look = async () => {
      try {
        if (!document.hidden) {
          const found = await get<{ runs: Run[]; left_out?: number }>("runs");
          if (!stopped) set({ runs: found.runs, leftOut: found.left_out ?? 0, error: "", ready: true });
        }
      } catch (error) {
        if (!stopped) set((old) => ({ ...old, error: (error as Error).message, ready: true }));
      }
      if (!stopped && !embedded) timer = window.setTimeout(look, 2000);
    };
    void look();
    return () => {
      stopped = true;
      clearTimeout(timer);
    };
  }, []);
  return state;
}

export function useWidth<E extends HTMLElement>(): [{ current: E | null }, number] {
  const ref = useRef<E>(null);
  const [width, set] = useState(0);
  useEffect(() => {
    if (!ref.current) return;
    const seen = new ResizeObserver((entries) => set(Math.floor(entries[0]!.contentRect.width)));
    seen.observe(ref.current);
    return () => seen.disconnect();
  }, []);
  return [ref, width];
}

// Single keys, while nothing is being typed.
export function useKeys(keys: Record<string, () => void>): void {
  const latest = useRef(keys);
  latest.current = keys;
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (target.closest("input, textarea, select, [contenteditable]")) {
        if (event.key === "Escape") target.blur();
        return;
      }
      const act = latest.current[event.key];
      if (act) {
        event.preventDefault();
        act();
      }
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  }, []);
}
